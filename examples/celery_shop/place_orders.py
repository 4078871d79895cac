"""Place a few orders."""

from shop import charge, send_receipt, sync_crm

for order, card in enumerate(("good", "declined", "stolen", "busy"), start=1):
    charge.delay(order, card)
send_receipt.delay(1, "ada@example.org")
send_receipt.delay(2, "no address")
sync_crm.apply_async((1,), ojs_retry={"max_attempts": 2})  # for this job only

"""Place a few orders."""

from shop import charge, send_receipt, sync_crm

for order, card in enumerate(("good", "declined", "stolen", "busy"), start=1):
    charge.send(order, card)
send_receipt.send(1, "ada@example.org")
send_receipt.send(2, "no address")
sync_crm.send_with_options(args=(1,), ojs_retry={"max_attempts": 2})  # for this job only

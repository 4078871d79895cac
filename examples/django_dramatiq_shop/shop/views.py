"""Orders, and the jobs that did not get through."""

from functools import partial

from django.db import transaction
from django.http import HttpRequest, JsonResponse
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST

from ojs_bridge.dramatiq import bridge_of

from .models import Order
from .tasks import charge


@csrf_exempt
@require_POST
def place_order(request: HttpRequest) -> JsonResponse:
    """Place an order; it is charged once it is in the database."""
    with transaction.atomic():
        order = Order.objects.create(card=request.POST["card"])
        transaction.on_commit(partial(charge.send, order.pk))
    return JsonResponse({"order": order.pk}, status=201)


def show_order(_: HttpRequest, order: int) -> JsonResponse:
    """Say whether an order is charged."""
    return JsonResponse({"charged": Order.objects.get(pk=order).charged})


def dead_letters(_: HttpRequest) -> JsonResponse:
    """List the jobs that somebody has to look at."""
    letters = bridge_of(charge.broker).dead_letters.list().letters
    return JsonResponse({letter.id: f"{letter.type}: {letter.reason}" for letter in letters})

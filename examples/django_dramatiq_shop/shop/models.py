"""The shop's data."""

from django.db import models


class Order(models.Model):
    """An order, charged or not yet."""

    card = models.CharField(max_length=20)
    charged = models.BooleanField(default=False)

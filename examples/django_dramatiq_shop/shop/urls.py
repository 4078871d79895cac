"""The addresses of the pages."""

from django.urls import path

from . import views

urlpatterns = [
    path("orders", views.place_order),
    path("orders/<int:order>", views.show_order),
    path("dead-letters", views.dead_letters),
]

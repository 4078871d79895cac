"""The page's static files, which need no token: what they show is asked for with the one that is typed in."""

from __future__ import annotations

from importlib import resources
from pathlib import PurePath

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

INDEX = "index.html"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css"}
_FILES = {file.name: file for file in (resources.files(__package__) / "page").iterdir()}


def routes() -> list[Route]:
    """Return the routes of the page and its files."""
    return [Route("/", _served, methods=["GET"]), Route("/page/{name}", _served, methods=["GET"])]


def _served(request: Request) -> Response:
    name = request.path_params.get("name", INDEX)
    found, media_type = _FILES.get(name), TYPES.get(PurePath(name).suffix)
    if found is None or media_type is None:
        raise HTTPException(404)
    return Response(found.read_bytes(), media_type=media_type, headers={"Cache-Control": "no-cache"})

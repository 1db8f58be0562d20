"""A page as one HTML file that loads nothing: templates, inline scripts with their hashes, figures as JSON."""

from __future__ import annotations

import base64
import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from pathlib import Path

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from .style import Drawing
from .text import budget_label, milliseconds, percent, rate, seconds


def render_page(template: str, drawings: Sequence[Drawing], context: Mapping[str, object]) -> str:
    """``template`` as HTML text, with its figures, styles and scripts inline.

    The page's Content-Security-Policy names its scripts by their hashes and forbids every request.
    """
    plotly, script = _scripts()
    return (
        _environment()
        .get_template(template)
        .render(
            drawings={drawing.name: drawing for drawing in drawings},
            figures={drawing.name: _embed(drawing) for drawing in drawings if drawing.figure is not None},
            css=Markup(_template_text("report.css")),
            plotly=Markup(plotly),
            script=Markup(script),
            script_hashes=Markup(f"{_csp_hash(plotly)} {_csp_hash(script)}"),
            **context,
        )
    )


def moment(iso: str) -> str:
    """``2026-01-05 10:02 UTC`` for an ISO 8601 stamp with a zone; anything else as it stands."""
    try:
        stamp = datetime.fromisoformat(iso)
    except ValueError:
        return iso
    return f"{stamp.astimezone(UTC):%Y-%m-%d %H:%M} UTC" if stamp.tzinfo else f"{stamp:%Y-%m-%d %H:%M}"


def write_atomically(path: Path, text: str) -> None:
    """Write ``text`` to ``path``, whole or not at all. Raises ValueError where that cannot be done."""
    try:
        _replace(path, text)
    except OSError as error:
        raise ValueError(f"{path}: cannot be written ({error.strerror})") from error


def _replace(path: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _embed(drawing: Drawing) -> Markup:
    """The figure as JSON that is safe inside a script element."""
    text = "{}" if drawing.figure is None else str(drawing.figure.to_json(engine="json"))
    escaped = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return Markup(escaped)


def _inline(script: str) -> str:
    """``script`` so that no end tag inside it can close its element."""
    return script.replace("</script", "<\\/script").replace("\r\n", "\n").strip()


@cache
def _csp_hash(script: str) -> str:
    digest = hashlib.sha256(script.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


@cache
def _scripts() -> tuple[str, str]:
    """plotly.js, which the page runs once it can be read, and the page's own script."""
    return _inline(get_plotlyjs()), _inline(_template_text("report.js"))


@cache
def _environment() -> Environment:
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=FunctionLoader(_template_text),
    )
    environment.filters |= {
        "ms": milliseconds,
        "seconds": seconds,
        "rate": rate,
        "percent": percent,
        "budget": budget_label,
    }
    return environment


def _template_text(name: str) -> str:
    return resources.files(__package__).joinpath("templates", name).read_text(encoding="utf-8")

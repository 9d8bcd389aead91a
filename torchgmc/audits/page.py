"""Parts of a self-contained HTML page: tables, pictures, sections, and the frame around them.

No script, no font and no picture is fetched: figures are inlined, and follow the reader's light or dark setting. Every
text is escaped. The frame with its style is ``page.html``. A file is written completely or not at all.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from torchgmc.audits.tabular import Table
from torchgmc.engine.files import write_file

VERDICTS = ("holds", "violated", "undecided")


@dataclass(frozen=True)
class Picture:
    """A PNG, and one for dark pages; ``text`` says what it shows to those who cannot see it."""

    png: bytes
    text: str
    dark: bytes | None = None


@dataclass(frozen=True)
class Section:
    """A heading with paragraphs, tables, pictures, tables to unfold and a long text to unfold, shown in this order.

    ``folds`` are (name, table), ``long`` is (name, text): shown as it is, e.g. JSON, when the reader opens it.
    """

    heading: str
    paragraphs: Sequence[str] = ()
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()
    long: tuple[str, str] | None = None
    folds: Sequence[tuple[str, Table]] = ()


def write_html(
    path: str | Path,
    title: str,
    certificate: str,
    sections: Sequence[Section],
    *,
    lead: str = "",
    verdict: str = "",
    facts: Sequence[tuple[str, str]] = (),
    notes: Sequence[str] = (),
    answer: str = "",
) -> Path:
    """Writes a page and returns its path.

    ``path``: of the file; an old one is replaced only when the new one is complete. ``title``: of the page. ``certificate``:
    one line that says what was shown and with what confidence. ``sections``: in order. ``lead``: a paragraph under the title.
    ``verdict``: "holds", "violated" or "undecided": colours the certificate. ``facts``: name and value of a few figures under
    the certificate. ``notes``: warnings to read with it. ``answer``: a sentence above the certificate, for readers in a hurry.
    """
    if verdict not in ("", *VERDICTS):
        raise ValueError(f"`verdict` must be one of {', '.join(VERDICTS)} or empty, got {verdict!r}.")
    shown = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    frame = Template(files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    page = frame.substitute(
        title=escape(title),
        lead=f'<p class="lead">{escape(lead)}</p>' if lead else "",
        kind=f"card {verdict}" if verdict else "card",
        certificate=(f"<strong>{escape(answer)}</strong> " if answer else "") + escape(certificate),
        facts=f"<dl>{shown}</dl>" if shown else "",
        notes="".join(f'<p class="note">{escape(text)}</p>' for text in notes),
        sections="\n".join(map(_section, sections)),
    )
    return write_file(path, page.encode())


def brief(*parts: str | Table) -> str:
    """Paragraphs and tables one below the other, for a notebook."""
    return "".join(_table(part) if isinstance(part, Table) else f"<p>{escape(part)}</p>" for part in parts if part)


def _section(section: Section) -> str:
    parts = [f"<h2>{escape(section.heading)}</h2>"]
    parts += [f"<p>{escape(text)}</p>" for text in section.paragraphs]
    parts += [_table(table) for table in section.tables]
    parts += [_picture(picture) for picture in section.pictures]
    parts += [_fold(name, table) for name, table in section.folds]
    if section.long is not None:
        name, text = map(escape, section.long)
        parts.append(f"<details><summary>{name}</summary><pre>{text}</pre></details>")
    return f"<section>{''.join(parts)}</section>"


def _fold(name: str, table: Table) -> str:
    return f"<details><summary>{escape(name)}</summary>{_table(table)}</details>"


def _table(table: Table) -> str:
    kinds = {name: ' class="n"' for name in table.numeric} | {name: ' class="long"' for name in table.wrapped}
    right = [kinds.get(name, "") for name in table.columns]
    heads = "".join(f'<th scope="col"{kind}>{escape(name)}</th>' for name, kind in zip(table.columns, right, strict=True))
    wide = f'<tr class="more"><td colspan="{len(table.columns)}">'
    more = [f"{wide}{_fold(*part)}</td></tr>" for part in table.beneath] or [""] * len(table.rows)
    rows = "".join(
        f"<tr>{''.join(_cell(text, kind) for text, kind in zip(row, right, strict=True))}</tr>{beneath}"
        for row, beneath in zip(table.rows, more, strict=True)
    )
    caption = f"<p>{escape(table.caption)}</p>" if table.caption else ""
    return f'{caption}<div class="scroll" tabindex="0"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'


def _cell(text: str, kind: str) -> str:
    verdict = next((word for word in VERDICTS if text.startswith(word)), None)
    inside = f'<span class="{verdict}">{escape(text)}</span>' if verdict else escape(text)
    return f"<td{kind}>{inside}</td>"


def _picture(picture: Picture) -> str:
    dark = f'<source media="(prefers-color-scheme: dark)" srcset="{_inline(picture.dark)}">' if picture.dark else ""
    return (
        f'<figure class="scroll" tabindex="0"><picture>{dark}'
        f'<img src="{_inline(picture.png)}" alt="{escape(picture.text)}"></picture>'
        f"<figcaption>{escape(picture.text)}</figcaption></figure>"
    )


def _inline(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"

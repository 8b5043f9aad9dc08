"""Hooks of the site: links to files that are no pages, code that must be that of its file, pictures in their pages,
paths and calls that may break where a table is narrow, and options of a command that may not.
"""

import importlib.util
import logging
import re
import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_spec = importlib.util.spec_from_file_location("docs_code", Path(__file__).with_name("code.py"))
assert _spec is not None and _spec.loader is not None
_code = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_code)
log = logging.getLogger("mkdocs.hooks.site")
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)#\s]*)(#[^)\s]*)?\)")
ROLE = re.compile(r":(?:func|class|meth|attr):<code>~?(?:[\w.]+\.)?(\w+)</code>")
PATH = re.compile(r"(?<=<code>)[^<\n]*\.py(?:::\w+(?:\[[^<\]]*\])?)?(?=</code>)")
CELL = re.compile(r"<td[^>]*>.*?</td>", re.DOTALL)
CALL = re.compile(r"(?<=<code>)[^<\s]{24,}(?=</code>)")
FLAG = re.compile(r"<code>(?=--?\w[\w-]*(?: \w+)?</code>)")
PICTURE = re.compile(r'<p><img alt="[^"]*" src="([^"]*pictures/[^"]+\.svg)"\s*/?></p>')
BOOST = {"faults.md": 8.0, "refused.md": 6.0, "options.md": 6.0} | dict.fromkeys(
    ("map.md", "mutants.md", "rules.md", "streams.md", "results.md", "compatibility.md"), 0.25
)
"""What a search shows first, and last: whoever pastes an error wants its remedy, not the rules of maintainers."""


def on_config(config: Any) -> Any:
    """The address of the repository stands in pyproject.toml."""
    project = tomllib.loads((Path(config.docs_dir).parent / "pyproject.toml").read_text())
    config.repo_url = project["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"] or None
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """A link out of docs/ holds in a checkout; in the site it goes to the repository, or names the file."""
    if page.file.src_path in BOOST:
        page.meta["search"] = {"boost": BOOST[page.file.src_path]}
    if _code.filled(markdown) != markdown:
        log.warning("%s shows code that differs from its file: python docs/_site/code.py", page.file.src_path)

    def replace(match: re.Match[str]) -> str:
        text, path, fragment = match.groups(default="")
        target = (Path(page.file.abs_src_path).parent / path).resolve()
        root = Path(config.docs_dir).parent
        if target.is_relative_to(config.docs_dir):
            return match[0]
        if not target.exists():
            log.warning("%s links to %s, which does not exist", page.file.src_path, path)
        if not config.repo_url:
            return _named(text, str(target.relative_to(root)), markdown[: match.start()])
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{target.relative_to(root)}{fragment})"

    return LINK.sub(replace, markdown)


def _named(text: str, file: str, before: str) -> str:
    """Return the text of a link with the file that it leads to; in parentheses, unless there are some around it."""
    if text == file:
        return f"`{file}`"
    paragraph = before.rsplit("\n\n", 1)[-1]
    return f"{text}: `{file}`" if paragraph.count("(") > paragraph.count(")") else f"{text} (`{file}`)"


def on_page_content(html: str, page: Any, config: Any, **_: Any) -> str:
    """A picture becomes part of its page, where the style sheet reaches it; a role in a docstring becomes its name."""

    def replace(match: re.Match[str]) -> str:
        name = Path(match[1]).name
        return f'<div class="picture">{Path(config.docs_dir, "pictures", name).read_text()}</div>'

    html = ROLE.sub(r"<code>\1</code>", html)
    html = CELL.sub(lambda cell: CALL.sub(lambda match: re.sub(r"[(=](?!\))", r"\g<0><wbr>", match[0]), cell[0]), html)
    html = PATH.sub(lambda match: re.sub(r"[/_]", r"\g<0><wbr>", match[0]), html)
    html = FLAG.sub('<code class="flag">', html)
    return PICTURE.sub(replace, html)

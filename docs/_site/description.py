"""README as a package index shows it: its links and pictures lead to the repository, or are left out without one."""

import re

LINK = re.compile(r"(!?)\[([^\]]+)\]\((?!https?:|#)([^)]*)\)")
PICTURE_ALONE = re.compile(r"!\[[^\]]*\]\((?!https?:)[^)]*\)\n\n")
WITHOUT = (
    "\n\nThe pages named here are in `docs/` of the source distribution; `make docs` there builds them as a site.\n"
)


def description(readme: str, repository: str, version: str) -> str:
    """Return ``readme`` with targets in ``repository`` at the tag of ``version``; without one, as text."""
    if not repository:
        return LINK.sub(r"\2", PICTURE_ALONE.sub("", readme)) + WITHOUT

    def replace(match: re.Match[str]) -> str:
        picture, text, target = match.groups()
        return f"{picture}[{text}]({repository.rstrip('/')}/{'raw' if picture else 'blob'}/v{version}/{target})"

    return LINK.sub(replace, readme)

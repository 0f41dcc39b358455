"""mdBook preprocessor: links that lead out of the book.

Pages link to other files of the repository with relative paths, which work on GitHub. In the book these files
do not exist. With `git-repository-url` in book.toml the links lead there; without it, the path is shown as text.
"""

import json
import posixpath
import re
import sys

LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(((?:\.\./)+[^)\s]*)\)")


def rewritten(content, page, repository):
    """Returns the content of a page with its links out of the book replaced."""

    def replace(link):
        text, target = link[1], link[2]
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
        if path.startswith("docs/"):
            return link[0]
        if repository:
            return f"[{text}]({repository.rstrip('/')}/blob/HEAD/{path})"
        path = path.split("#")[0]
        return text if text.strip("`") == path else f"{text} (`{path}`)"

    return LINK.sub(replace, content)


def visit(items, repository):
    for item in items:
        chapter = item.get("Chapter") if isinstance(item, dict) else None
        if chapter:
            if chapter.get("path"):
                chapter["content"] = rewritten(chapter["content"], chapter["path"], repository)
            visit(chapter["sub_items"], repository)


def main():
    if sys.argv[1:2] == ["supports"]:
        return
    context, book = json.load(sys.stdin)
    html = context["config"].get("output", {}).get("html", {})
    visit(book.get("items") or book.get("sections") or [], html.get("git-repository-url"))
    json.dump(book, sys.stdout)


if __name__ == "__main__":
    main()

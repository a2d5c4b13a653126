"""Tables of names from the tutorial about migrating, without its code and prose."""


def tables(tutorial: str) -> list[str]:
    """Returns Markdown lines: each table below its heading in the tutorial."""
    lines: list[str] = []
    heading = None
    for line in tutorial.splitlines():
        words = line.removeprefix("# ")
        if words.startswith("## "):
            heading = words
        elif words.startswith("|"):
            if heading:
                # A rubric, because text inside a directive cannot have sections.
                lines += ["", "```{rubric} " + heading.removeprefix("## "), "```", ""]
                heading = None
            lines.append(words)
    return lines

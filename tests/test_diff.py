"""The change between two functions, as a learner sees it."""

import re

from course.check import show_diff


def plain(images):
    logits = model(images)  # noqa: F821
    return logits < 1


def mixed(images):
    ### BEGIN SOLUTION
    with autocast():  # noqa: F821
        logits = model(images)  # noqa: F821
    ### END SOLUTION
    return logits < 1


def read_rows(page):
    """Style and text of each line of a diff."""
    return re.findall(r'<span style="(.*?)">(.*?)</span>', page)


def test_the_diff_marks_each_line_in_sign_and_colour_and_leaves_out_the_solution_markers():
    page = show_diff(plain, mixed).data
    assert "SOLUTION" not in page
    rows = read_rows(page)
    assert [text[0] for _, text in rows] == ["−", "−", "+", "+", "+", " "]
    assert rows[-1][0] == "display:block;" and rows[-1][1].rstrip() == "      return logits &lt; 1"
    assert len({style for style, _ in rows}) == 3
    # A line is a block: else the background of the next one is painted over its underscores.
    assert all(style.startswith("display:block;") for style, _ in rows)
    assert show_diff(plain, mixed).data == page


def test_the_diff_of_texts_keeps_what_is_the_same_and_every_line_of_it():
    before = "\n".join(f"line {number}" for number in range(30))
    page = show_diff("    " + before.replace("\n", "\n    "), before.replace("line 29", "last")).data
    assert [text.split()[-1] for _, text in read_rows(page)] == [*map(str, range(29)), "29", "last"]
    assert page.count("background") == 2
    same = show_diff(before, before).data
    assert "background" not in same and "line 7" in same

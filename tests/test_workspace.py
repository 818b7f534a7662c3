import ast
import contextlib
import json
import os
import re

import nbformat
import pytest
from harness.drawn import assert_explains
from harness.notebook_rules import LINE
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from course import workspace
from course.check import LABS, attempts
from course.parts import PARTS
from course.start import write_start
from course.workspace import GUESS_MARK, MANIFEST, Report, make_stub, update
from lab_common import LabError
from lab_common.files import hold_folder

EXERCISE = """def double(x):
    ### BEGIN SOLUTION
    y = x + x
    return y
    ### END SOLUTION

double(2)"""
STUBBED = """def double(x):
    # YOUR CODE HERE
    raise NotImplementedError("Replace this line with your code, then run the cell again.")

double(2)"""


def make_lab(text: str = "A lab", solution: str = EXERCISE):
    cell = new_code_cell(solution, id="exercise", execution_count=3, outputs=[new_output("stream", text="4\n")])
    cell.metadata["tags"] = ["nbval-ignore-output"]
    cells = [new_markdown_cell(f"# {text}", id="title"), new_code_cell("x = 1", id="plain", execution_count=2), cell]
    return new_notebook(cells=cells, metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})


@pytest.fixture
def labs(tmp_path):
    folder = tmp_path / "notebooks"
    (folder / "figures").mkdir(parents=True)
    (folder / "scripts" / "deep").mkdir(parents=True)
    nbformat.write(make_lab(), folder / "01_lab.ipynb")
    nbformat.write(make_lab("Another"), folder / "02_lab.ipynb")
    (folder / "figures" / "idea.svg").write_bytes(b"<svg/>\r\n")
    (folder / "scripts" / "deep" / "train.sh").write_text("echo hello\n")
    (folder / "scripts" / "deep" / "train.sh").chmod(0o755)
    return folder


@pytest.fixture
def copy(tmp_path):
    return tmp_path / "workspace"


FILES = ("01_lab.ipynb", "02_lab.ipynb", "figures/idea.svg", "scripts/deep/train.sh")


def test_a_stub_replaces_the_solution_at_its_indentation_and_nothing_else():
    lab = make_lab()
    stub = make_stub(lab)
    assert [cell.source for cell in stub.cells] == ["# A lab", "x = 1", STUBBED]
    assert [cell.id for cell in stub.cells] == ["title", "plain", "exercise"]
    assert stub.cells[2].metadata["tags"] == ["nbval-ignore-output"]
    assert stub.metadata == lab.metadata
    assert all(cell.outputs == [] and cell.execution_count is None for cell in stub.cells[1:])
    assert lab.cells[2].source == EXERCISE  # the original is left alone
    assert lab.cells[2].outputs
    nbformat.validate(stub)


def test_an_example_guess_becomes_none_with_a_line_that_says_what_to_type():
    source = (
        "mine = {\n    'DP': 0.9,  # example guess: time with DP\n    2: -3,  # example guess: time with two\n}\nx = 3"
    )
    (*_, cell) = make_stub(make_lab(solution=source)).cells
    assert cell.source.splitlines() == [
        "# YOUR GUESS HERE: type a number in place of None, then run the cell.",
        "mine = {",
        "    'DP': None,  # time with DP, for example 0.9",
        "    2: None,  # time with two, for example -3",
        "}",
        "x = 3",
    ]


def test_every_guess_of_the_labs_starts_at_none_in_the_learner_s_copy(root):
    for path in sorted((root / "notebooks").glob("*.ipynb")):
        lab = nbformat.read(path, as_version=4)
        copied = {cell.id: cell.source for cell in make_stub(lab).cells}
        asking = [cell for cell in lab.cells if GUESS_MARK in cell.source]
        assert asking, path.name
        for cell in asking:
            found = find_guesses(copied[cell.id])
            assert found and set(found) == {None}, f"{path.name}, cell {cell.id}: {found}"
            assert len(found) == len(find_guesses(cell.source)) and None not in find_guesses(cell.source)
            assert max(map(len, copied[cell.id].splitlines())) <= LINE


def find_guesses(source: str) -> list[object]:
    """The values that a cell gives to names such as ``my_ratio``, also those in a dictionary."""
    given = [node for node in ast.parse(source).body if isinstance(node, ast.Assign)]
    values = [ast.literal_eval(node.value) for node in given if ast.unparse(node.targets[0]).startswith("my_")]
    return [one for value in values for one in (value.values() if isinstance(value, dict) else [value])]


def test_a_script_s_solutions_become_stubs_too_and_its_other_lines_stay(labs, copy):
    script, plain = labs / "scripts" / "train.py", labs / "scripts" / "plain.py"
    script.write_text(f"import os\n\n\n{EXERCISE}\n")
    script.chmod(0o755)
    plain.write_bytes(b"x = 1  # no newline at the end, \xe2\x80\x9chere\xe2\x80\x9d\r\ny = 2")
    (labs / "scripts" / "notes.txt").write_text(EXERCISE)  # no script
    update(labs, copy)
    stubbed = STUBBED.replace("then run the cell again", "then run it again")
    assert (copy / "scripts" / "train.py").read_text() == f"import os\n\n\n{stubbed}\n"
    assert os.access(copy / "scripts" / "train.py", os.X_OK)
    assert (copy / "scripts" / "plain.py").read_bytes() == plain.read_bytes()
    assert (copy / "scripts" / "notes.txt").read_text() == EXERCISE
    compile((copy / "scripts" / "train.py").read_text(), "train.py", "exec")


def test_a_script_follows_upstream_until_the_learner_has_changed_it(labs, copy):
    script, learners = labs / "scripts" / "train.py", copy / "scripts" / "train.py"
    script.write_text(EXERCISE)
    update(labs, copy)
    script.write_text(EXERCISE.replace("x + x", "2 * x"))  # the solution alone: the learner sees no difference
    assert "scripts/train.py" in update(labs, copy).current
    script.write_text(f"# better\n{EXERCISE}")
    assert update(labs, copy).refreshed == ("scripts/train.py",)
    learners.write_text("mine")
    script.write_text(f"# still better\n{EXERCISE}")
    assert update(labs, copy).outdated == ("scripts/train.py",)
    assert learners.read_text() == "mine"


@pytest.mark.parametrize(
    "source",
    [
        "### BEGIN SOLUTION\na = 1",
        "a = 1\n### END SOLUTION",
    ],
)
def test_an_unbalanced_marker_is_named_with_notebook_and_cell(labs, copy, source):
    nbformat.write(make_lab(solution=source), labs / "03_lab.ipynb")
    with pytest.raises(LabError) as caught:
        update(labs, copy)
    assert caught.value.where == "03_lab.ipynb, code cell [2]"
    assert not copy.exists()


def test_the_first_copy_holds_everything(labs, copy):
    assert update(labs, copy) == Report(written=FILES)
    assert nbformat.read(copy / "01_lab.ipynb", 4).cells[2].source == STUBBED
    assert (copy / "figures" / "idea.svg").read_bytes() == b"<svg/>\r\n"
    assert os.access(copy / "scripts" / "deep" / "train.sh", os.X_OK)
    assert sorted(p.relative_to(copy).as_posix() for p in copy.rglob("*") if p.is_file()) == sorted([MANIFEST, *FILES])


def test_an_unchanged_copy_follows_upstream(labs, copy):
    update(labs, copy)
    nbformat.write(make_lab("A better lab"), labs / "01_lab.ipynb")
    (labs / "figures" / "idea.svg").write_text("<svg></svg>")
    report = update(labs, copy)
    assert report.refreshed == ("01_lab.ipynb", "figures/idea.svg")
    assert nbformat.read(copy / "01_lab.ipynb", 4).cells[0].source == "# A better lab"
    assert update(labs, copy) == Report(current=FILES)


def test_a_changed_copy_is_kept_silently_while_upstream_is_the_same(labs, copy, capsys):
    update(labs, copy)
    edited = (copy / "01_lab.ipynb").read_bytes().replace(b"x = 1", b"x = 2")
    (copy / "01_lab.ipynb").write_bytes(edited)
    for _ in range(2):
        assert workspace.main(["--notebooks", str(labs), "--workspace", str(copy)]) == 0
        assert (copy / "01_lab.ipynb").read_bytes() == edited
        assert capsys.readouterr().out == "Your copy of the labs: 3 up to date; 1 changed by you and kept.\n"


def test_a_changed_copy_with_a_new_version_is_kept_and_said(labs, copy, capsys):
    update(labs, copy)
    (copy / "01_lab.ipynb").write_bytes(b"mine")
    nbformat.write(make_lab("A better lab"), labs / "01_lab.ipynb")
    for _ in range(2):  # said again until the learner has chosen
        assert workspace.main(["--notebooks", str(labs), "--workspace", str(copy)]) == 0
        assert (copy / "01_lab.ipynb").read_bytes() == b"mine"
        printed = capsys.readouterr().out
        assert "01_lab.ipynb changed upstream. Yours is edited and was kept." in printed
        assert "rename yours (for example to my_01_lab.ipynb), then run: make workspace" in printed
    (copy / "01_lab.ipynb").rename(copy / "my_01_lab.ipynb")
    assert update(labs, copy) == Report(written=FILES[:1], current=FILES[1:])
    assert nbformat.read(copy / "01_lab.ipynb", 4).cells[0].source == "# A better lab"
    assert (copy / "my_01_lab.ipynb").read_bytes() == b"mine"


def test_what_the_learner_deleted_is_written_again(labs, copy):
    update(labs, copy)
    (copy / "02_lab.ipynb").unlink()
    assert update(labs, copy).written == ("02_lab.ipynb",)
    assert (copy / "02_lab.ipynb").exists()


@pytest.mark.parametrize("garbage", [None, "{"])
def test_without_a_manifest_what_differs_is_the_learner_s(labs, copy, garbage):
    update(labs, copy)
    (copy / "01_lab.ipynb").write_bytes(b"mine")
    (copy / MANIFEST).unlink()
    if garbage is not None:
        (copy / MANIFEST).write_text(garbage)
    assert update(labs, copy) == Report(current=FILES[1:], kept=FILES[:1])
    assert (copy / "01_lab.ipynb").read_bytes() == b"mine"
    nbformat.write(make_lab("A better lab"), labs / "01_lab.ipynb")
    nbformat.write(make_lab("A better lab"), labs / "02_lab.ipynb")
    report = update(labs, copy)
    assert (report.outdated, report.refreshed) == (FILES[:1], FILES[1:2])


def test_a_notebook_that_cannot_be_read_is_named(labs, copy, capsys):
    (labs / "02_lab.ipynb").write_text("{ half a noteb")
    assert workspace.main(["--notebooks", str(labs), "--workspace", str(copy)]) == 1
    told = capsys.readouterr().err
    assert told.startswith("02_lab.ipynb cannot be read.")
    # The one file: the others may hold edits that a checkout of the folder would throw away.
    assert f"fix: git checkout -- {labs / '02_lab.ipynb'}\n" in told


@pytest.mark.parametrize("point", range(6))
def test_cut_off_at_any_write_it_does_not_take_its_own_files_for_the_learner_s(labs, copy, monkeypatch, point):
    update(labs, copy)
    (copy / "02_lab.ipynb").write_bytes(b"mine")
    write, calls = workspace._write, []

    def write_until_cut(*arguments):
        calls.append(arguments)
        if len(calls) > point:
            raise KeyboardInterrupt
        write(*arguments)

    monkeypatch.setattr(workspace, "_write", write_until_cut)
    for name in FILES[:2]:
        nbformat.write(make_lab("A better lab"), labs / name)
    (labs / "figures" / "idea.svg").write_text("<svg></svg>")
    with contextlib.suppress(KeyboardInterrupt):
        update(labs, copy)
    monkeypatch.setattr(workspace, "_write", write)
    for name in FILES[:2]:  # upstream goes on meanwhile
        nbformat.write(make_lab("The best lab"), labs / name)
    assert update(labs, copy).outdated == ("02_lab.ipynb",)
    assert nbformat.read(copy / "01_lab.ipynb", 4).cells[0].source == "# The best lab"
    assert (copy / "02_lab.ipynb").read_bytes() == b"mine"


def test_what_the_learner_saves_while_the_labs_are_brought_up_to_date_is_kept(labs, copy, monkeypatch):
    """JupyterLab saves by itself, and each file takes the disk its time."""
    update(labs, copy)
    mine, write = copy / FILES[1], workspace._write
    for name in FILES[:2]:
        nbformat.write(make_lab("A better lab"), labs / name)

    def save_meanwhile(path, *arguments):
        write(path, *arguments)
        if path == copy / FILES[0]:
            mine.write_text("my work")

    monkeypatch.setattr(workspace, "_write", save_meanwhile)
    report = update(labs, copy)
    assert mine.read_text() == "my work"
    assert report.refreshed == (FILES[0],) and report.outdated == (FILES[1],)


def test_a_picture_that_the_learner_pasted_is_an_edit(labs, copy):
    update(labs, copy)
    notebook = json.loads((copy / "01_lab.ipynb").read_text())
    notebook["cells"][0]["attachments"] = {"image.png": {"image/png": "aGk="}}
    (copy / "01_lab.ipynb").write_text(json.dumps(notebook))
    nbformat.write(make_lab("A better lab"), labs / "01_lab.ipynb")
    assert update(labs, copy).outdated == ("01_lab.ipynb",)


def test_two_at_a_time_do_not_write_one_copy(labs, copy):
    update(labs, copy)
    with hold_folder(copy, "It is taken"), pytest.raises(LabError) as caught:
        update(labs, copy)
    assert_explains(caught.value, "by another command", "wait")


def test_a_notebook_that_was_only_run_is_brought_up_to_date(labs, copy):
    update(labs, copy)
    path = copy / "01_lab.ipynb"
    lab = nbformat.read(path, as_version=4)
    lab.cells[1].execution_count, lab.cells[1].outputs = 7, [new_output("stream", text="7\n")]
    lab.metadata["kernelspec"] = {"name": "other", "display_name": "Other"}
    nbformat.write(lab, path)
    run = path.read_bytes()
    assert "01_lab.ipynb" in update(labs, copy).current and path.read_bytes() == run, "its outputs stay"
    upstream = nbformat.read(labs / "01_lab.ipynb", as_version=4)
    upstream.cells[1].source += "  # better"
    nbformat.write(upstream, labs / "01_lab.ipynb")
    assert update(labs, copy).refreshed == ("01_lab.ipynb",)
    lab.cells[1].source = "mine"
    nbformat.write(lab, path)
    assert "01_lab.ipynb" in update(labs, copy).outdated + update(labs, copy).kept


def test_the_first_page_names_the_labs_and_where_to_go_on(root, copy, runs):
    copy.mkdir()
    write_start(root / "notebooks", copy)
    page = (copy / "START.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| [Lab ")]
    assert len(rows) == len(list((root / "notebooks").glob("*.ipynb")))
    headings = re.findall(r"^## (.+)$", page, re.MULTILINE)
    assert headings == [part.title for part in PARTS] and [lab for part in PARTS for lab in part.labs] == list(LABS)
    assert "**Begin with [Lab 0 · Start here](00_start_here.ipynb).**" in page and rows[0].endswith("| 0 of 3 |")
    (copy / "04_data_parallel.ipynb").write_bytes((root / "notebooks" / "04_data_parallel.ipynb").read_bytes())
    write_start(copy, copy)
    assert [line for line in (copy / "START.md").read_text().splitlines() if line in rows] == [rows[4]], "its own count"
    write_start(root / "notebooks", copy)
    assert all(len(row.split("|")) == 7 and "" not in [part.strip() for part in row.split("|")[1:-1]] for row in rows)
    for number in ("0.1", "0.2", "0.3", "1.1"):
        attempts.note(number, "right", "")
    write_start(root / "notebooks", copy)
    page = (copy / "START.md").read_text()
    assert "**Continue with [Lab 1 " in page and "| 3 of 3 |" in page and "| 1 of 4 |" in page

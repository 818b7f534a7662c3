"""Rules for every notebook, as functions that describe the faults they find."""

import math
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

from nbformat import reader

from course.notebooks import BEGIN, END

TAGS = {"nbval-ignore-output", "raises-exception", "slide"}
SECTIONS = ("Predict", "What you saw", "If something went wrong", "Further reading")
SECTIONS_OF_LAB_0 = SECTIONS[1:]
# Where a machine's places begin; preceded by a letter it is the path of a web address.
ABSOLUTE = re.compile(r"(?<![\w.])/(?:home|tmp|root|work|Users|mnt|opt|var|workspace)/|\b[A-Z]:\\(?!n)")
# A line of 88 characters fits into the page of JupyterLab: a longer one is scrolled sideways.
LINE = 88
# What the minutes of a lab are made of. All but the run is assumed. Adults read 238
# words of their own language a minute (M. Brysbaert, 2019, doi:10.1016/j.jml.2019.104047); ours read with care, and in
# another one. An exercise takes so many minutes, and more where its solution is long. Reading code is not counted.
WORDS_PER_MINUTE, MINUTES_PER_EXERCISE, LINES_OF_EXERCISE, MINUTES_PER_LINE = 150, 5, 5, 0.5


def find_solutions(notebook):
    """Returns the full source, with the solution, of every cell that becomes a stub, by the cell's id."""
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return {cell.id: cell.source for cell in code if BEGIN in map(str.strip, cell.source.splitlines())}


def find_faults(path: Path) -> list[str]:
    """Returns every fault of one notebook."""
    if path.stat().st_size > 2**20:
        return [f"{path.stat().st_size / 2**20:.1f} MiB; the limit is 1 MiB"]
    # Not nbformat.read, which silently gives a doubled id a new name.
    notebook = reader.reads(path.read_text(encoding="utf-8"))
    return [
        *find_format_faults(notebook),
        *find_run_faults(notebook),
        *find_output_faults(notebook),
        *find_code_faults(notebook),
        *find_prose_faults(notebook, path.parent),
        *find_anatomy_faults(notebook, int(path.name[:2]), path.parent),
    ]


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def prose(notebook) -> str:
    """Returns the text of all markdown cells, without fenced code."""
    texts = (cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    return re.sub(r"^```.*?^```", "", "\n\n".join(texts), flags=re.MULTILINE | re.DOTALL)


def headings(notebook) -> list[tuple[int, str]]:
    """Returns level and text of each heading."""
    found = re.findall(r"^(#{1,6}) +(.+?)\s*$", prose(notebook), flags=re.MULTILINE)
    return [(len(marks), text) for marks, text in found]


def tags(cell) -> set[str]:
    return set(cell.metadata.get("tags", []))


def name_cell(cell) -> str:
    return f"cell {cell.get('id', '?')}"


def find_format_faults(notebook) -> list[str]:
    """Checks ids, metadata and tags: nothing that changes with each run, no misspelt tag."""
    doubled = [name for name, count in Counter(cell.get("id") for cell in notebook.cells).items() if count > 1]
    faults = [f"the id {name} is not unique" for name in doubled]
    if notebook.metadata.get("kernelspec", {}).get("name") != "python3":
        faults.append("the kernel is not python3")
    for cell in notebook.cells:
        volatile = {"execution", "ExecuteTime", "widgets"} & set(cell.metadata)
        faults += [f"{name_cell(cell)}: metadata {key!r}" for key in volatile]
        faults += [f"{name_cell(cell)}: tag {tag!r} is not known" for tag in tags(cell) - TAGS]
    return faults


def find_run_faults(notebook) -> list[str]:
    """Checks for one run from a fresh kernel. nbval never compares a cell without an execution count."""
    cells = code_cells(notebook)
    faults = [
        f"{name_cell(cell)}: execution count {cell.execution_count} instead of {number}"
        for number, cell in enumerate(cells, start=1)
        if cell.execution_count != number
    ]
    ignored = [cell for cell in cells if "nbval-ignore-output" in tags(cell)]
    if 2 * len(ignored) > len(cells):
        faults.append(f"{len(ignored)} of {len(cells)} outputs are not compared; at most half may be")
    return faults


def find_output_faults(notebook) -> list[str]:
    """Checks outputs: no stray errors, nothing on stderr, no local paths, and a text for each figure."""
    faults = []
    for cell in code_cells(notebook):
        failed = any(output.output_type == "error" for output in cell.outputs)
        if failed != ("raises-exception" in tags(cell)):
            faults.append(f"{name_cell(cell)}: {'an error' if failed else 'tagged raises-exception, without an error'}")
        if any(output.get("name") == "stderr" for output in cell.outputs):
            faults.append(f"{name_cell(cell)}: output on stderr")
        figure = any("image/png" in output.get("data", {}) for output in cell.outputs)
        if figure and not 60 <= len(cell.metadata.get("alt", "")) <= 330:
            faults.append(
                f"{name_cell(cell)}: a figure without 'alt' in the cell's metadata, its text of 60 to 330 letters"
            )
        for text in texts_of(cell.outputs):
            faults += [f"{name_cell(cell)}: absolute path in the output"] if ABSOLUTE.search(text) else []
    return faults


def texts_of(outputs) -> list[str]:
    """Returns every text in a cell's outputs."""
    texts = []
    for output in outputs:
        texts += [output.get("text", ""), output.get("evalue", ""), *output.get("traceback", [])]
        texts += [value for kind, value in output.get("data", {}).items() if kind.startswith("text/")]
    return texts


def find_code_faults(notebook) -> list[str]:
    """Checks for short lines, without a machine's paths and without assertions."""
    faults = []
    for cell in code_cells(notebook):
        longest = max(map(len, cell.source.splitlines()), default=0)
        if longest > LINE:
            faults.append(f"{name_cell(cell)}: a line of {longest} characters; the limit is {LINE}")
        if ABSOLUTE.search(cell.source):
            faults.append(f"{name_cell(cell)}: absolute path in the code")
        if re.search(r"^\s*assert\b", cell.source, re.MULTILINE):
            faults.append(f"{name_cell(cell)}: a bare assertion; check.claim says what was found")
    return faults


def count_words(notebook) -> int:
    """Counts the words of all markdown cells, without fenced code."""
    return len([word for word in prose(notebook).split() if word != ">"])


def count_minutes(notebook, folder: Path) -> int:
    """Counts the minutes that a lab takes a learner: reading its text, waiting for cells, solving exercises.

    Args:
        notebook: The notebook; its metadata hold the seconds of the run, which count as 0 if it was never saved.
        folder: Folder of the scripts that are exercises.
    """
    texts = [cell.source for cell in code_cells(notebook)]
    texts += [read_if_there(folder / name) for name in find_exercise_scripts("\n".join(texts))]
    solutions = [re.findall(rf"{BEGIN}\n(.*?){END}", text, re.DOTALL) for text in texts]
    lines = [len([line for line in "".join(parts).splitlines() if line.strip()]) for parts in solutions if parts]
    exercises = sum(MINUTES_PER_EXERCISE + MINUTES_PER_LINE * max(0, count - LINES_OF_EXERCISE) for count in lines)
    seconds = notebook.metadata.get("lab", {}).get("seconds", 0)
    return math.ceil(count_words(notebook) / WORDS_PER_MINUTE + seconds / 60 + exercises)


def find_prose_faults(notebook, folder: Path) -> list[str]:
    """Checks text: pictures exist and are described, links are addresses, no local paths."""
    text = prose(notebook)
    pictures = re.findall(r"!\[([^\]]*)\]\(([^)\s]+)", text)
    for element in re.findall(r"<img\b[^>]*>", text):
        found = {name: (re.findall(rf'\b{name}="([^"]*)"', element) or [""])[0] for name in ("alt", "src")}
        pictures.append((found["alt"], found["src"]))
    faults = [f"picture {target} does not exist" for _, target in pictures if not (folder / target).is_file()]
    faults += [f"picture {target} is not described" for alt, target in pictures if len(alt.split()) < 3]
    faults += [f"absolute path in the prose: {found[0]}" for found in ABSOLUTE.finditer(text)]
    # Whether a page is still there only a network can tell; that it is an address, and no slip of the pen, we can.
    links = re.findall(r"(?<!!)\[[^\]\n]+\]\(([^)\n]*)\)", re.sub(r"`[^`\n]*`", "", text))
    faults += [f"the link {link!r} is no address" for link in links if not is_link(link, folder)]
    return faults


def is_link(target: str, folder: Path) -> bool:
    """Returns True if a link's target is a secure address with a host and no spaces, or a file by the notebook."""
    if "://" in target:
        return re.fullmatch(r"https://[\w-]+(\.[\w-]+)+(/[^\s\"<>]*)?", target) is not None
    return bool(target) and (folder / target.partition("#")[0]).exists()


def find_exercise_scripts(source: str) -> list[str]:
    """Returns the scripts that a cell passes to a check, as paths relative to the notebook."""
    return re.findall(r'\bcheck\.exercise\(\s*"[\d.]+",\s*"(scripts/[^"]+\.py)"', source)


def find_anatomy_faults(notebook, lab: int, folder: Path) -> list[str]:
    """Checks the parts of a lab: headings that skip no level, and exercises that are checked."""
    found = headings(notebook)
    faults = []
    if not found or found[0][0] != 1 or not re.fullmatch(rf"Lab {lab} · \S.*", found[0][1]):
        faults.append(f"the first heading is not '# Lab {lab} · …'")
    for (above, _), (level, text) in pairwise(found):
        if level > above + 1:
            faults.append(f"the heading {text!r} leaves out a level")
    for section in SECTIONS if lab else SECTIONS_OF_LAB_0:
        if not any(section.lower() in text.lower() for _, text in found):
            faults.append(f"no section {section!r}")
    exercises = set(re.findall(rf"^### Exercise ({lab}\.\d) · \S", prose(notebook), re.MULTILINE))
    if len(exercises) != len(re.findall(r"^> \*\*Your turn: \S", prose(notebook), re.MULTILINE)):
        faults.append("an exercise is a heading `### Exercise 1.1 · …`, and a quotation that begins **Your turn: …**")
    code = "\n".join(cell.source for cell in code_cells(notebook))
    # A script is one solution, however many gaps it has: its parts only run together.
    beside = {name for name in find_exercise_scripts(code) if BEGIN in read_if_there(folder / name)}
    faults += [f"exercise {number} is not checked" for number in exercises if f'check.exercise("{number}"' not in code]
    solutions = code.count(BEGIN) + len(beside)
    if solutions < len(exercises):
        faults.append(f"{solutions} solutions for {len(exercises)} exercises")
    return faults


def read_if_there(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""

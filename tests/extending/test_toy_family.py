"""The worked example of docs/extending.md: a model family in one file, which trains like one process.

StarCoder 2 combines the blocks of three families that are there: only its file is added.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.extending.copies import DOCS, ROOT, compare_with_one_process, make_copy, run_module
from tests.support import cells

FILE = Path(__file__).with_name("starcoder2.py")
ADDED = {"parallel3d/families/starcoder2.py": FILE.read_text()}
IN_MODELS = '"starcoder2": ModelConfig(**SIZES, architecture="starcoder2", num_key_value_heads=2, sliding_window=5),\n'
LAYOUTS = {
    "tp2-pp2-dp2": cells.CUBE,
    "tp4-copied-heads": dict(tp_size=4, sequence_parallel=True),
    "stages-1-2": cells.STAGES_1_2,
}


def test_the_docs_show_this_file_and_the_line_of_the_tests() -> None:
    text = DOCS.read_text()
    assert f"```python\n{FILE.read_text()}```\n" in text
    assert f"```python\n{IN_MODELS}```\n" in text


@pytest.mark.full
def test_it_trains_like_one_process(tmp_path: Path) -> None:
    model = dict(architecture="starcoder2", num_key_value_heads=2, sliding_window=5)
    eps = dict(eps=1e-5)  # biases of keys have no gradient but rounding, which AdamW would make steps of
    copy = make_copy(tmp_path / "copy", ADDED)
    found = compare_with_one_process(copy, LAYOUTS, model=model, optimizer=eps)
    assert found == {"losses": found["losses"], **dict.fromkeys(LAYOUTS, [])}
    assert found["losses"][-1] < found["losses"][0]


@pytest.mark.full
def test_it_is_hugging_faces_function_and_reads_its_folders(tmp_path: Path) -> None:
    """The tests of all families, after the line that docs/extending.md adds."""
    models = "tests/support/hf_models.py"
    before = (ROOT / models).read_text()
    extended = before.replace("MODELS = {\n", "MODELS = {\n" + IN_MODELS)
    assert extended != before
    copy = make_copy(tmp_path / "copy", {**ADDED, models: extended})
    report = run_module(copy, "pytest", "-p", "no:cacheprovider", "-k", "starcoder2", "tests/models")
    assert "9 passed" in report

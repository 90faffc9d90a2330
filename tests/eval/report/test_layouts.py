"""The paper's tables: fed with its own numbers they come out as it prints them."""

import re
from pathlib import Path

import pytest

from cdlm.eval.report.layouts import TableStyle, ablation_tables, conditional_tables, unconditional_tables
from cdlm.eval.report.paper import TABLES
from cdlm.eval.report.rows import Section, paper_name, read_sections, training_steps
from cdlm.eval.report.tables import ReportTable, rank_column

from .rows import row

METHODS = {
    "AR": ("ar", None, "none"),
    "MDLM": ("mdlm", None, "masked"),
    "MCDLM": ("mcdlm", None, "masked"),
    "MCDLM-PPLOptimized": ("mcdlm-pplopt", None, "masked"),
    "MDLM+SDTT": ("sdtt", "mdlm", "masked"),
    "MCDLM+SDTT": ("sdtt", "mcdlm", "masked"),
    "UDLM": ("udlm", None, "uniform"),
    "DUO": ("duo", None, "uniform"),
    "UCDLM": ("ucdlm", None, "uniform"),
    "DUO+DCD": ("duo-dcd", "duo", "uniform"),
}


def paper_rows(number: int, precision: str = "fp64") -> list[dict]:  # type: ignore[type-arg]
    """The paper's table as rows of results."""
    rows = []
    for name, cells in TABLES[number].items():
        plain, greedy = name.removesuffix(" (greedy)"), name.endswith("(greedy)")
        method, base, process = METHODS[plain]
        for steps, text in cells.items():
            assert isinstance(steps, int)
            ppl, entropy = map(float, re.findall(r"[\d.]+", text))
            how = {"precision": precision, **({"final_step": "argmax"} if greedy else {})}
            history = {"method": base, "steps": 100_000, "from": None} if base else None
            count = None if process == "none" else steps
            rows.append(row(plain, count, ppl, entropy, process=process, method=method, base=history, **how))
    return rows


def cells_by_row(table: ReportTable) -> dict[str, list[str]]:
    return {line.name: [entry.text for entry in line.entries] for line in table.lines if line.entries}


@pytest.mark.parametrize(("number", "precision"), [(1, "fp64"), (2, "fp64"), (7, "naive-fp32")])
def test_unconditional_tables_hold_the_papers_numbers(number: int, precision: str) -> None:
    section = Section("gpt2-large", "robust", 1024, paper_rows(number, precision))
    table, intervals = unconditional_tables(section, TableStyle(5.0))
    assert "[" in next(iter(cells_by_row(intervals).values()))[-1]
    found = cells_by_row(table)
    for name, cells in TABLES[number].items():
        assert [text for text in found[name][2:] if text] == list(cells.values())
    marked = table.markdown()
    if number == 1:  # the marks of the paper's own first table
        for best in ("242.1 (5.2)", "105.0 (5.3)", "57.5 (5.1)", "47.0 (5.5)", "35.3 (5.3)", "28.1 (4.9)\\*"):
            assert f"**{best}**" in marked
        for second in ("331.2 (5.0)", "71.6 (5.3)", "48.7 (5.3)", "40.1 (5.3)", "32.5 (5.3)", "33.5 (5.2)"):
            assert f"<u>{second}</u>" in marked
        assert marked.count("<u>40.1 (5.3)</u>") == 2  # equals share a rank
        assert marked.index("Base models") < marked.index("MCDLM-PPLOptimized") < marked.index("Distilled models")
    if number == 2:
        assert "**110.4 (4.8)\\***" in marked
        assert "118.4 (3.9)\\*" in marked
    latex = table.latex()
    assert latex.count(r"\\") == len(TABLES[number]) + 1 + 2
    assert latex.count("{") == latex.count("}")


def test_the_papers_numbers_stand_beneath_ours_if_asked() -> None:
    section = Section("gpt2-large", "robust", 1024, [row("mine", 8, 300.0), row("mine", 9, 290.0)])
    table, _ = unconditional_tables(section, TableStyle(None, compare=True))
    assert "not comparable" not in table.caption
    other = Section("smollm2", "robust", 256, section.rows)
    assert (
        "another judge (gpt2-large), other lengths (1024 tokens)"
        in unconditional_tables(other, TableStyle(None, True))[0].caption
    )
    assert [line.name for line in table.lines] == ["mine", "paper"]
    assert [entry.text for entry in table.lines[1].entries] == ["", "", "682.7 (5.9)", ""]
    assert table.lines[1].quoted


def test_conditional_tables_show_the_originals_too() -> None:
    rows = []
    for text in ("ptb", "openwebtext"):
        for steps in (8, 64):
            for name, ppl in (("MDLM", 40.0), ("MCDLM", 30.0)):
                more = {
                    "bleu2": 60.0,
                    "bleu2_tokenization": "words",
                    "mauve": 0.9,
                    "reference_ppl": 20.0,
                    "dataset": text,
                }
                rows.append(row(name, steps, ppl, task="conditional", mauve_warning="32 texts; few", **more))
    three, eight = conditional_tables(Section("gpt2-large", "robust", 1024, rows), TableStyle(5.0))
    assert [head[0] for head in three.heads[0]] == ["Model", "openwebtext", "ptb"]  # in the paper's order
    assert cells_by_row(three)["MCDLM"] == ["30.0 / 60.0"] * 4
    assert cells_by_row(three)["the originals themselves"] == ["20.0 / 100"] * 4
    assert "**30.0 / 60.0**" in three.markdown()
    assert cells_by_row(eight)["MDLM"] == ["0.90"] * 4
    assert "32 texts; few" in eight.caption


@pytest.mark.parametrize(
    ("number", "variants"),
    [
        (4, ["", ":steps=staged", ":steps=increasing", ":steps=decreasing"]),
        (5, [":kappa=0,kappa_end=0", ":kappa=0.4,kappa_end=0.2", ":kappa=1,kappa_end=1"]),
        (5, [":kappa=0.4", ":kappa=1,kappa_end=1,additive=true", ":kappa=1,kappa_end=1", ":kappa=1,kappa_end=0.2"]),
        (6, [":divergence=jsd", ":divergence=kl", ":divergence=reverse_kl"]),
        (6, [":divergence=reverse_kl", ":divergence=reverse_kl,floor=-1e6"]),
    ],
)
def test_ablations_are_found_by_what_they_change(number: int, variants: list[str]) -> None:
    rows = [
        row(f"run {k}", n, 100.0 + k, method=f"mcdlm-pplopt{variant}")
        for k, variant in enumerate(variants)
        for n in (8, 64)
    ]
    (table,) = ablation_tables(Section("gpt2-large", "robust", 1024, rows), TableStyle(5.0, compare=True))
    assert table.title.startswith(f"Table {number}.")
    assert len([line for line in table.lines if not line.quoted]) == len(variants)
    assert len([line for line in table.lines if line.quoted]) == len(variants)  # each has its row in the paper


def test_ablations_are_of_one_method_and_its_own_sampler() -> None:
    rows = [row("a", method="mcdlm", ppl=100.0), row("b", method="mcdlm:divergence=kl", ppl=200.0)]
    rows += [
        row("c", method="ucdlm", process="uniform", ppl=50.0),
        row("a", method="mcdlm", ppl=7.0, final_step="argmax"),
    ]
    (table,) = ablation_tables(Section("gpt2-large", "robust", 1024, rows), TableStyle(None))
    assert cells_by_row(table) == {"CDLM w. jsd": ["100.0 / 5.2"], "CDLM w. kl": ["200.0 / 5.2"]}


def test_ablations_have_the_bound_where_it_was_measured() -> None:
    rows = [row("a", method="mcdlm", ppl=100.0), row("b", method="mcdlm:divergence=kl", ppl=200.0)]
    bounds = [{"task": "likelihood", "model": "b", "dataset": s, "nelbo_ppl": v} for s, v in (("x", 31.25), ("y", 9.0))]
    (table,) = ablation_tables(Section("gpt2-large", "robust", 1024, rows), TableStyle(None, compare=True), bounds)
    ours = {key: cells for key, cells in cells_by_row(table).items() if key != "paper"}
    assert ours == {"CDLM w. jsd": ["100.0 / 5.2", ""], "CDLM w. kl": ["200.0 / 5.2", "31.2"]}
    assert {len(line.entries) for line in table.lines} == {2}


def test_each_ablation_table_has_the_variants_of_one_method() -> None:
    """Rows of several methods together: those with the changes that a table is about are found."""
    methods = ("mcdlm:anchor=jsd", "mcdlm", "mcdlm-pplopt", "mcdlm-pplopt:steps=staged", "mcdlm-pplopt:divergence=kl")
    rows = [row(method, 8, 100.0 + k, method=method) for k, method in enumerate(methods)]
    found = ablation_tables(Section("gpt2-large", "robust", 1024, rows), TableStyle(None))
    names = {table.title.split(".")[0]: [line.name for line in table.lines] for table in found}
    assert names == {
        "Table 4": ["CDLM w. random scheduler", "CDLM w. staged scheduler"],
        "Table 6": ["CDLM w. jsd", "CDLM w. kl"],
    }


def test_names_and_training_steps_are_read_off_the_training() -> None:
    distilled = row("x", method="sdtt", base={"method": "mcdlm:kappa=0.2", "steps": 100_000, "from": None})
    assert paper_name(distilled) == "MCDLM+SDTT"
    assert training_steps(distilled) == ("100K", "1K")
    assert training_steps(row("x")) == ("1K", "0")
    further = row("x", method="mcdlm", base={"method": "mdlm", "steps": 3_000, "from": None})
    assert training_steps(further) == ("3K + 1K", "0")  # it goes on from a model, but distils none
    assert paper_name(row("from a hub", method=None)) == "from a hub"


def test_a_model_that_judges_itself_is_not_ranked() -> None:
    rows = [row("AR", None, 10.0, process="none", method="ar", own_judge=True), row("A", 8, 30.0), row("B", 8, 40.0)]
    table, _ = unconditional_tables(Section("AR", "robust", 1024, rows), TableStyle(None))
    assert "AR (the judge itself)" in table.markdown()
    assert "**30.0 (5.2)**" in table.markdown()


def test_ranks() -> None:
    assert rank_column([3.0, 1.0, None, 2.0]) == [0, 1, 0, 2]
    assert rank_column([1.04, 1.01, 5.0]) == [1, 1, 2]  # equal as printed
    assert rank_column([0.9, 0.8], smaller=False) == [1, 2]
    assert rank_column([0.954, 0.951, 0.9], 2, smaller=False) == [1, 1, 2]
    assert rank_column([25.34, 25.31], 2) == [2, 1]
    assert rank_column([None, 4.0]) == [0, 0]  # alone is not best


def write(folder: Path, rows: list[dict]) -> Path:  # type: ignore[type-arg]
    import json

    folder.mkdir()
    (folder / "results.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    return folder


def test_vocabularies_are_not_mixed(tmp_path: Path) -> None:
    mixed = write(tmp_path / "mixed", [row("a"), {**row("b"), "vocab_size": 16_384}])
    with pytest.raises(ValueError, match=r"50,257 tokens: a; 16,384 tokens: b.*results folder of its own"):
        read_sections([mixed])


def test_a_judge_that_was_trained_again_is_another(tmp_path: Path) -> None:
    mixed = write(tmp_path / "mixed", [{**row("a"), "judge_hash": "x"}, {**row("b"), "judge_hash": "y"}])
    with pytest.raises(ValueError, match=r"two judges are called .* read a, another \(y\) read b.*report them apart"):
        read_sections([mixed])


@pytest.mark.parametrize("part", ["model_hash", "seed", "dtype"])
def test_a_label_stands_for_one_thing(part: str, tmp_path: Path) -> None:
    twice = write(tmp_path / "twice", [row("a"), {**row("a"), part: "other"}])
    with pytest.raises(ValueError, match=f"a stands for two things, with the {part}.*NAME=MODEL"):
        read_sections([twice])


def test_judges_protocols_and_lengths_are_kept_apart_and_the_larger_cell_counts(tmp_path: Path) -> None:
    few, many = row("a", num=8), row("a", num=64)
    other = {**row("a"), "judge": "smollm2"}
    sections, rest = read_sections([write(tmp_path / "one", [many, few]), write(tmp_path / "two", [other])])
    assert [(section.judge, len(section.rows)) for section in sections] == [("gpt2-large", 1), ("smollm2", 1)]
    assert sections[0].rows[0]["num_samples"] == 64
    assert not rest

"""The distributional protocol: samples as a set, beside human text and beside naive samplers.

Every metric has a value for human text, and a z-score whose null distribution comes from random splits of human text.
Rows of human text that is not in the reference, and of naive samplers, stand beside those of the models.
"""

import dataclasses
import hashlib
import importlib.util
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from cdlm.data.tokens import open_tokens, read_meta
from cdlm.eval.cells import EvalCell
from cdlm.eval.columns import Baseline, Texts, human_baseline, measure_columns
from cdlm.eval.config import EvalConfig
from cdlm.eval.console import JUDGE_COST, CellProgress, cell_cost, num_judges, summarize_row
from cdlm.eval.human_text import HumanText, as_texts, read_human_text
from cdlm.eval.measure import provenance, stack_features
from cdlm.eval.naive import NAIVE_SAMPLERS, draw_naive
from cdlm.eval.null import NUM_SPLITS
from cdlm.eval.packages import is_installed
from cdlm.eval.results import FORMAT, ResultRow, Samples, append_row, hash_values, row_key, samples_by_key
from cdlm.eval.sampling import cell_samples, samples_header
from cdlm.eval.scorer import Judge
from cdlm.metrics.copying import copy_rates
from cdlm.metrics.diversity import ngram_entropy
from cdlm.text.pipeline import Pipeline

HUMAN = "human text"
STEPS_OF_A_TEXT = 8
"""Network evaluations that a text without any counts as, in the time that its judge takes."""
USUAL_JUDGE = "smollm2"


@dataclasses.dataclass(frozen=True)
class Reference:
    """What all rows of one judge are compared with."""

    human: HumanText
    baseline: Baseline
    judge: Judge | None
    corpus: Path | None
    fields: ResultRow
    """What a row depends on besides its samples."""


def with_installed_judge(config: EvalConfig, console: Console) -> EvalConfig:
    """With the judge that is installed, where none is named. Without any, columns that need one are left out."""
    if config.judge:
        return config
    if is_installed(USUAL_JUDGE):
        console.print(f"judge: {USUAL_JUDGE}, which is installed (--judge names others)", highlight=False)
        return dataclasses.replace(config, judge=(USUAL_JUDGE,))
    console.print("no judge is installed: perplexity and MAUVE are left out; to install two: make judges")
    return dataclasses.replace(config, judge=("none",))


def distributional_rows(
    cells: Sequence[EvalCell],
    config: EvalConfig,
    judges: Sequence[Judge | None],
    finished: dict[str, ResultRow],
    console: Console,
) -> Iterator[ResultRow]:
    """The rows of human text, of the naive samplers and of all cells, for each judge."""
    model = _common_model(cells)
    for judge in judges:
        if judge is not None and not _has_features(judge):
            console.print(f"MAUVE is left out for {judge.label}: {_NO_FEATURES}", highlight=False)
    length = config.max_length or model.max_length
    human = read_human_text(config.reference, model, length, config.samples_per_cell)
    corpus = _corpus_fields(config, model)
    files = samples_by_key(config.out)
    simple = {HUMAN: human.held} | {
        name: draw_naive(name, human.fit, config.samples_per_cell, config.seed) for name in NAIVE_SAMPLERS
    }
    fields = [_fields_of(judge, human, corpus) for judge in judges]
    headers: dict[str | EvalCell, ResultRow] = {
        **{name: _simple_header(name, human, model, length, config) for name in simple},
        **{cell: samples_header(cell, config) for cell in cells},
    }
    keys = {row: [row_key({**header, **each}) for each in fields] for row, header in headers.items()}
    missing = [row for row in headers if any(key not in finished for key in keys[row])]
    console.print(f"{len(headers)} rows, {len(headers) - len(missing)} of them finished before", highlight=False)
    judged_cost = STEPS_OF_A_TEXT * JUDGE_COST * max(1, num_judges(config))  # of one text
    simple_cost, pool_cost = config.samples_per_cell * judged_cost, len(human.pool) * judged_cost
    costs = {row: cell_cost(row, config) if isinstance(row, EvalCell) else simple_cost for row in missing}
    with CellProgress(console, sum(costs.values()) + pool_cost) as progress:
        references: list[Reference] = []
        if missing:
            progress.begin("human text", pool_cost)
            _, on_score = progress.callbacks(len(human.pool), num_judges(config), generated=False)
            references = [
                _reference(human, model, judge, each, config, on_score)
                for judge, each in zip(judges, fields, strict=True)
            ]
            progress.finish()
        for row, header in headers.items():
            if row in costs:
                is_cell = isinstance(row, EvalCell)
                progress.begin(row.name if isinstance(row, EvalCell) else row, costs[row])
                on_state, on_score = progress.callbacks(config.samples_per_cell, num_judges(config), is_cell)
                if isinstance(row, EvalCell):
                    samples = cell_samples(row, config, files, on_state)
                else:
                    samples = Samples(header, [{"token_ids": ids, "nfe": 0} for ids in simple[row]])
                for key, reference in zip(keys[row], references, strict=True):
                    if key not in finished:
                        finished[key] = _measured_row(samples, model, reference, config, on_score)
                        append_row(config.out, finished[key])
                        console.print(summarize_row(finished[key]), highlight=False, markup=False)
                progress.finish()
            yield from (finished[key] for key in keys[row])


def _common_model(cells: Sequence[EvalCell]) -> Pipeline:
    """A model whose tokenizer, length and packing are those of all."""
    first = cells[0].model
    for cell in cells:
        vocabularies = [_vocabulary(each) for each in (cell.model, first)]
        layouts = [(each.max_length, each.bos_framed, each.eos_padded) for each in (cell.model, first)]
        if vocabularies[0] != vocabularies[1] or layouts[0] != layouts[1]:
            what = "tokenizers" if vocabularies[0] != vocabularies[1] else "length or packing of their texts"
            raise ValueError(
                f"{cells[0].label} and {cell.label} differ in the {what}, so no human text is cut for both; evaluate "
                "them apart, each with an --out of its own."
            )
    return first


def _vocabulary(model: Pipeline) -> str:
    tokenizer = model.tokenizer
    return tokenizer.kind if tokenizer.model is None else tokenizer.model.to_str()


def _simple_header(name: str, human: HumanText, model: Pipeline, length: int, config: EvalConfig) -> ResultRow:
    """The header of a row without a model."""
    return {
        "format": FORMAT,
        "task": "unconditional",
        "kind": "human" if name == HUMAN else "naive",
        "model": name,
        "model_hash": hash_values({"name": name, "text": human.fingerprint}),
        "training": {},
        "process": None,
        "sampling": None,
        "clamp": False,
        "vocab_size": model.tokenizer.vocab_size,
        "max_length": length,
        "num_samples": config.samples_per_cell,
        "seed": config.seed,
    }


def _fields_of(judge: Judge | None, human: HumanText, corpus: ResultRow) -> ResultRow:
    return {
        "protocol": "distributional",
        "judge": judge.label if judge else "none",
        "judge_hash": judge.fingerprint if judge else "",
        "reference": human.name,
        "reference_hash": human.fingerprint,
        **corpus,
    }


def _corpus_fields(config: EvalConfig, model: Pipeline) -> ResultRow:
    """The corpus that copies are looked for in, if there is one."""
    if config.corpus is None:
        return {}
    open_tokens(config.corpus).check_vocabulary(model.tokenizer.vocab_size)
    return {"corpus": str(config.corpus), "corpus_hash": read_meta(config.corpus).splits["train"].sha256}


def _reference(
    human: HumanText,
    model: Pipeline,
    judge: Judge | None,
    fields: ResultRow,
    config: EvalConfig,
    on_score: Callable[[int], None],
) -> Reference:
    """The pool under a judge, with its null distributions. What the judge said is kept for the next run."""
    pool = as_texts(human.pool, model.tokenizer)
    if judge is not None:
        pool = _judged_once(pool, judge, config.out, on_score)
    pool = _with_copies(pool, config.corpus)
    return Reference(human, human_baseline(pool, config.samples_per_cell), judge, config.corpus, fields)


def _judged_once(texts: Texts, judge: Judge, out: Path, on_score: Callable[[int], None]) -> Texts:
    """Texts with what a judge says of them, from a file of an earlier run if there is one."""
    key = hashlib.sha256("\0".join([judge.fingerprint, *texts.strings]).encode()).hexdigest()[:16]
    path = out / f"human-{key}.npz"
    if path.is_file():
        with np.load(path) as kept:
            values = {name: kept[name] for name in kept.files}
        return dataclasses.replace(texts, **values)
    judged = _judged(texts, judge, on_score)
    values = {name: getattr(judged, name) for name in ("nats", "num_tokens", "features")}
    partial = path.with_suffix(".tmp.npz")
    np.savez(partial, **{name: value for name, value in values.items() if value is not None})
    partial.replace(path)
    return judged


def _judged(texts: Texts, judge: Judge, on_score: Callable[[int], None]) -> Texts:
    has_features = _has_features(judge)
    scores = judge.score(texts.strings, "distributional", has_features, on_score)
    return dataclasses.replace(
        texts,
        nats=np.array([score.nats for score in scores]),
        num_tokens=np.array([float(score.num_tokens) for score in scores]),
        features=stack_features(scores) if has_features else None,
    )


_NO_FEATURES = "it needs scikit-learn, and features that are not GPT-2's, which tell little of what people see"


def _has_features(judge: Judge) -> bool:
    return judge.architecture != "gpt2" and importlib.util.find_spec("sklearn") is not None


def _with_copies(texts: Texts, corpus: Path | None) -> Texts:
    if corpus is None:
        return texts
    return dataclasses.replace(texts, copied=np.array(copy_rates(texts.token_ids, open_tokens(corpus).ids)))


def _measured_row(
    samples: Samples, model: Pipeline, reference: Reference, config: EvalConfig, on_score: Callable[[int], None]
) -> ResultRow:
    """The row of some samples: every column, and what they cost."""
    header, lines = samples.header, samples.lines
    texts = as_texts([line["token_ids"] for line in lines], model.tokenizer)
    began = time.perf_counter()
    if reference.judge is not None:
        texts = _judged(texts, reference.judge, on_score)
    seconds = time.perf_counter() - began
    texts = _with_copies(texts, reference.corpus)
    nfe = sum(line["nfe"] for line in lines) / len(lines)
    row: ResultRow = {
        "kind": "model",
        **header,
        **reference.fields,
        "num_samples": len(lines),
        "splits": NUM_SPLITS,
        "pool": len(reference.human.pool),
        "nfe": nfe,
        "tokens_per_pass": sum(map(len, texts.token_ids)) / len(lines) / nfe if nfe else None,
        "judge_seconds": round(seconds, 3),
        "columns": measure_columns(texts, reference.baseline),
        "per_sample": _per_sample(texts),
    }
    sampling = header.get("sample_seconds")
    row["seconds_per_sample"] = None if sampling is None else round(sampling / len(lines), 4)
    return {**row, "key": row_key(row), **provenance(config)}


def _per_sample(texts: Texts) -> ResultRow:
    """What the intervals of figures resample."""
    found: ResultRow = {
        "h1": [round(ngram_entropy(ids), 5) for ids in texts.token_ids],
        "h2": [round(ngram_entropy(ids, 2), 5) for ids in texts.token_ids],
    }
    if texts.nats is not None and texts.num_tokens is not None:
        found |= {"nats": np.round(texts.nats, 4).tolist(), "tokens": texts.num_tokens.astype(int).tolist()}
    return found

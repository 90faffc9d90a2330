"""Flags and claims, in cases that are decided by hand."""

from cdlm.eval.claims import Entry, Score, faked_columns, refuting_samplers


def entry(name: str, error: float = 0.5, **scores: float) -> Entry:
    return Entry(name, {column: Score(z, error) for column, z in scores.items()})


def test_a_column_that_a_naive_sampler_wins_is_flagged() -> None:
    """Shuffled text has the entropy of human text; no model here comes close."""
    models = [entry("plain", ppl=20, h1=9), entry("sharp", ppl=4, h1=-8)]
    naive = [entry("shuffled", ppl=80, h1=-0.5), entry("periodic", ppl=-2.9, h1=-30)]
    assert faked_columns(models, naive) == {"h1": ["shuffled"]}  # ppl: 2.9 against 4 is within the interval
    precise = [entry("sharp", error=0.1, ppl=4)]
    assert faked_columns(precise, [entry("periodic", error=0.1, ppl=-2.9)]) == {"ppl": ["periodic"]}


def test_better_than_human_is_not_better() -> None:
    """A perplexity far below the human one is as far from it as one above."""
    models = [entry("model", ppl=-12, h1=0)]
    assert faked_columns(models, [entry("periodic", ppl=3)]) == {"ppl": ["periodic"]}
    assert faked_columns(models, [entry("periodic", ppl=-20)]) == {}


def test_a_claim_is_rejected_by_one_sampler_that_matches_everywhere() -> None:
    model = entry("model", ppl=5, h1=1, h2=2)
    naive = [entry("shuffled", ppl=60, h1=0, h2=9), entry("periodic", ppl=1, h1=-18, h2=-36)]
    assert refuting_samplers(model, ["h1"], naive) == ["shuffled"]
    assert refuting_samplers(model, ["ppl"], naive) == ["periodic"]
    assert refuting_samplers(model, ["ppl", "h1"], naive) == []  # each is matched, but not by the same sampler
    assert refuting_samplers(model, ["ppl", "h1"], [*naive, entry("both", ppl=-5.5, h1=2)]) == ["both"]


def test_to_match_is_to_be_within_the_interval() -> None:
    model = entry("model", ppl=5)
    assert refuting_samplers(model, ["ppl"], [entry("near", ppl=6)]) == ["near"]  # 1 < 1.96 * 0.71
    assert refuting_samplers(model, ["ppl"], [entry("far", ppl=7)]) == []

"""The figures of tensor parallelism agree with the shards, the records and the capture."""

import plotly.graph_objects as go
import pytest
from helpers.studies.drawn import subtitle, texts, words
from helpers.studies.parallel_studies import study as made_study

from labkit.figures import cut_figure, gpus_figure, scaling_figure, waiting_figure
from labkit.figures.parallel import MATRICES, pieces
from labkit.models.config import ModelConfig
from labkit.models.policies import model_config_of
from labkit.models.presets import PRESETS
from labkit.models.shards import shard
from labkit.published import NOT_MEASURED_HERE, published_scaling
from labkit.studies.parallel import ParallelStudy

CASES = [("gpt2", 2), ("gpt2", 5), ("qwen2-0.5b", 4), ("bloom-560m", 3), ("gpt-j-6b", 4), ("llama-2-7b", 1)]


def config(name: str) -> ModelConfig:
    return model_config_of(PRESETS[name].hf_config)


@pytest.fixture
def study() -> ParallelStudy:
    return made_study()


@pytest.mark.parametrize(("name", "ranks"), CASES)
def test_pieces_cover_every_matrix_once_and_are_what_the_ranks_hold(name: str, ranks: int) -> None:
    model = config(name)
    shards = tuple(shard(model, ranks, rank) for rank in range(ranks))
    for matrix in MATRICES:
        shape = model.layer_shapes()[matrix]
        matrix_pieces = pieces(shards, matrix, shape)
        assert [matrix_pieces[0].begin, *(piece.end for piece in matrix_pieces)] == [
            *(piece.begin for piece in matrix_pieces),
            shape[matrix_pieces[0].dim],
        ]
        for rank, rank_shard in enumerate(shards):
            matrix_cut = rank_shard.cut(matrix)
            rows_held = sum(end - begin for begin, end in set(matrix_cut.ranges)) if matrix_cut else shape[0]
            assert sum(piece.end - piece.begin for piece in matrix_pieces if rank in piece.holders) <= rows_held
            assert all(piece.holders for piece in matrix_pieces)


def test_uneven_heads_and_shared_kv_heads_are_visible() -> None:
    figure = cut_figure(config("qwen2-0.5b"), 4)
    names = [trace.name for trace in figure.data]
    assert "rank 1: 4 query heads, KV 0, 1" in names
    assert "rank 3: 3 query heads, KV 1" in names
    assert any(name.startswith("qkv, rows 896 to 959: rank 0 and rank 1") for name in names)
    assert "norm1.weight" in subtitle(figure)
    assert "attn_out.weight" not in subtitle(figure)


def test_more_ranks_than_heads_are_refused() -> None:
    with pytest.raises(ValueError, match="use tp_size <= 12"):
        cut_figure(config("gpt2"), 13)


def test_scaling_has_the_measured_the_ideal_and_what_the_memory_allows(study: ParallelStudy) -> None:
    lines = {trace.name: trace for trace in scaling_figure(study).data if trace.type == "scatter"}
    assert lines["measured"].y == pytest.approx((12, 12 / 1.7, 12 / 2.5))
    assert lines["ideal: 1 / ranks"].y == pytest.approx((12, 6, 3))
    assert lines["what the memory allows"].y == pytest.approx((12, 12 / 1.8, 4))
    assert all(tuple(line.x) == (1, 2, 4) for line in lines.values())


def test_each_rank_has_a_bar_of_its_waiting(study: ParallelStudy) -> None:
    (bars,) = [trace for trace in scaling_figure(study).data if trace.type == "bar"]
    assert list(bars.y) == ["rank 0 of 2", "rank 1 of 2", *(f"rank {rank} of 4" for rank in range(4))]
    assert list(bars.x) == pytest.approx([2, 5, 2, 5, 1, 3])


def test_the_step_of_every_rank_is_on_one_axis_with_the_skew_of_its_sums(study: ParallelStudy) -> None:
    figure = waiting_figure(study)
    assert isinstance(figure, go.Figure)
    stages = {trace.name: trace for trace in figure.data if trace.name in ("mlp", "all_reduce")}
    assert sorted(stages["mlp"].y) == ["rank 0"] * 4 + ["rank 1"] * 4
    assert min(stages["mlp"].base) == pytest.approx(0.005)
    (skews,) = [trace for trace in figure.data if trace.name == "rank 1 came last"]
    assert list(skews.y) == pytest.approx([7.0] * 4)
    assert "4 sums in the step" in subtitle(figure)


def test_without_a_capture_the_reason_is_shown(study: ParallelStudy) -> None:
    assert waiting_figure(ParallelStudy(study.config, study.comparisons, None, ("no profiler",))) == "no profiler"


def test_ours_and_the_articles_are_apart_and_said_to_be(study: ParallelStudy) -> None:
    figure = gpus_figure(study)
    measured_bars, published_bars = figure.data
    assert list(measured_bars.x) == pytest.approx([1.7, 2.5])
    assert published_bars.name == NOT_MEASURED_HERE
    assert measured_bars.xaxis != published_bars.xaxis
    assert "the memory allows 1.80x" in texts(figure)
    assert "hardware not stated" in words(" ".join(published_bars.y))


def test_published_scaling_is_of_one_model_method_and_batch() -> None:
    frame = published_scaling()
    assert (frame["few_gpus"] < frame["many_gpus"]).all()
    (row,) = frame[frame["model"] == "gpt-j-6b"].to_dict("records")
    assert (row["few_gpus"], row["many_gpus"], row["batch"]) == (1, 4, 4)
    assert row["speedup"] == pytest.approx(1482.22 / 551.79)
    bloom = frame[frame["model"] == "bloom-176b"].set_index("method")
    assert bloom.loc["ds-inference", "speedup"] == pytest.approx(156.51 / 89.09)


def test_published_scaling_takes_the_nearest_batch() -> None:
    assert set(published_scaling(16).query("model == 'bloom-176b'")["batch"]) == {16}

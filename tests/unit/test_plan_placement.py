"""Tests the command that plans placements."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tools import plan_placement

NODES = ["--num-nodes", "4", "--slots-per-node", "2"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = plan_placement.main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, _ = run(capsys, *arguments, "--json")
    assert code == 0
    result: dict[str, Any] = json.loads(out)
    return result


def test_given_counts_skip_the_allocation(capsys: pytest.CaptureFixture[str]) -> None:
    result = document(capsys, "--replica-counts", "2,3,3", *NODES, "--lost-nodes", "2")
    (layer,) = result["layers"]
    assert layer["replica_counts"] == [2, 3, 3]
    assert sorted(e for node in layer["placement"] for e in node) == [0, 0, 1, 1, 1, 2, 2, 2]
    assert layer["survival"] == result["survival"] == {"2": pytest.approx(5 / 6)}


def test_the_construction_of_the_paper(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--replica-counts", "2,3,3", *NODES, "--algorithm", "maximum_rank_overlap", "--lost-nodes", "2"]
    assert document(capsys, *arguments)["survival"] == {"2": pytest.approx(4 / 6)}


def test_loads_of_layers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "loads.json"
    path.write_text("[[1, 1, 30, 4], [5, 5, 5, 5]]")
    lost = ["--lost-nodes", "1", "--lost-nodes", "3"]
    result = document(capsys, "--loads", str(path), "--num-nodes", "5", "--slots-per-node", "4", *lost)
    assert [layer["replica_counts"] for layer in result["layers"]] == [[5, 5, 5, 5], [5, 5, 5, 5]]
    assert set(result["survival"]) == {"1", "3"}
    assert result["survival"]["1"] == 1.0
    assert result["survival"]["3"] == min(layer["survival"]["3"] for layer in result["layers"])


@pytest.mark.parametrize("algorithm", ["overlap_search", "maximum_rank_overlap", "spread", "compact"])
def test_table(capsys: pytest.CaptureFixture[str], algorithm: str) -> None:
    code, out, _ = run(capsys, "--replica-counts", "4,4", *NODES, "--algorithm", algorithm)
    assert code == 0
    assert "all layers" in out
    assert "node 3" in out


def test_short_slots_are_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "loads.json"
    path.write_text("[[1, 1, 1, 1, 1, 1]]")
    _, out, _ = run(capsys, "--loads", str(path), *NODES)
    assert "too few slots: the smallest number of replicas of any expert is 1 instead of 2" in out
    assert document(capsys, "--loads", str(path), *NODES)["min_replicas"] == [1]


def test_plot(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "x.png"
    assert run(capsys, "--replica-counts", "2,3,3", *NODES, "--plot", str(picture))[0] == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = run(capsys, "--replica-counts", "2,3,3", *NODES, "--plot", str(tmp_path / "x.png"))
    assert code == 4
    assert "needs matplotlib" in err


@pytest.mark.parametrize(
    ("content", "extra", "code", "message"),
    [
        ("[[1,1,1,1,1,1,1,1,1]]", [], 2, "num_experts=9: must be at most 8, the number of slots"),
        ("[[1,2]]", ["--min-replicas", "5"], 2, "--min-replicas=5: must be at most 4, the value of --num-nodes"),
        ("[[1,2]]", ["--min-replicas", "0"], 2, "--min-replicas=0"),
        ("[[1,-2]]", [], 3, "expert 1 is -2"),
        ("[[1,NaN]]", [], 3, "expert 1 is nan"),
        ("[[1,2]]", ["--lost-nodes", "5"], 2, "--lost-nodes=5"),
        ("[[1,2]]", ["--iteration", "7"], 3, "iteration=7"),
    ],
)
def test_bad_loads_are_refused_by_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str, extra: list[str], code: int, message: str
) -> None:
    path = tmp_path / "loads.json"
    path.write_text(content)
    result, out, err = run(capsys, "--loads", str(path), *NODES, *extra)
    assert (result, out) == (code, "")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("counts", "extra", "message"),
    [
        ("0,4,4", [], "replica_counts[0]=0: must be at least 1: each expert needs a slot"),
        ("4,5", [], "must have a sum of at most 8 (4 ranks x 2 slots)"),
        ("1,1,1,1,1,1,1,1,1", [], "num_experts=9"),
        ("2,x", [], "--replica-counts=2,x"),
        ("1,4", ["--min-replicas", "2"], "replica_counts[0]=1: must be at least --min-replicas=2"),
        ("4,4", ["--iteration", "1"], "--iteration=1: needs --loads"),
    ],
)
def test_bad_counts_are_refused_by_name(
    capsys: pytest.CaptureFixture[str], counts: str, extra: list[str], message: str
) -> None:
    code, _, err = run(capsys, "--replica-counts", counts, *NODES, *extra)
    assert code == 2
    assert message in err


UNEVEN = "[[1, 1, 1, 1, 60, 4, 4, 8], [5, 5, 5, 5, 9, 9, 9, 9]]"


def test_the_curve_starts_at_the_fewest_slots(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "loads.json"
    path.write_text(UNEVEN)
    arguments = ["--loads", str(path), "--num-nodes", "8", "--slots-per-node", "4", "--lost-nodes", "3", "--curve"]
    code, out, _ = run(capsys, *arguments, "--json")
    points = json.loads(out)
    assert code == 0
    assert sorted({point["num_slots"] for point in points}) == [2, 3, 4], "8 experts with 2 replicas need 2 slots"
    most = [point for point in points if point["num_slots"] == 4]
    assert most[0]["survival_share"] == 0.0 and len(most) > 1
    assert min(most, key=lambda point: point["imbalance"]) == most[0], "the default is the most balanced choice"
    survive = [point["survival"][0]["probability"] for point in most]
    assert max(survive) == survive[-1], "survival grows with the share"
    code, out, _ = run(capsys, *arguments)
    assert code == 0 and len(out.splitlines()) == 1 + len(points)


def test_the_curve_is_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path, picture = tmp_path / "loads.json", tmp_path / "curve.png"
    path.write_text(UNEVEN)
    options = ["--num-nodes", "8", "--slots-per-node", "3", "--curve", "--plot", str(picture)]
    assert run(capsys, "--loads", str(path), *options)[0] == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--curve", "--replica-counts", "4,4"], "--curve=true: needs --loads"),
        (["--survival-share", "0.5", "--algorithm", "spread", "--replica-counts", "4,4"], "--survival-share=0.5"),
        (["--survival-share", "1.5", "--replica-counts", "4,4"], "survival_share=1.5: must be from 0 to 1"),
    ],
)
def test_impossible_options_of_the_curve(capsys: pytest.CaptureFixture[str], options: list[str], named: str) -> None:
    code, _, err = run(capsys, *options, *NODES)
    assert code != 0
    assert named in err


def test_the_survival_share_changes_the_placement(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "loads.json"
    path.write_text(UNEVEN)
    options = ["--loads", str(path), "--num-nodes", "8", "--slots-per-node", "4", "--lost-nodes", "3"]
    balanced, surviving = (document(capsys, *options, "--survival-share", share) for share in ("0", "1"))
    assert surviving["survival"]["3"] >= balanced["survival"]["3"]
    assert surviving["layers"] != balanced["layers"]

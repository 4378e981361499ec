"""Tests that a dense checkpoint of earlier code is read with the same bits."""

import json
import shutil
from pathlib import Path

import pytest

from megatron_ft.testing import engines
from tests.helpers import dense_fixture

pytestmark = pytest.mark.slow  # builds a model


def test_a_checkpoint_from_before_is_loaded_bit_for_bit(tmp_path: Path) -> None:
    from megatron_ft.mcore.checkpoint.state import DenseState

    expected = json.loads((dense_fixture.FOLDER / "dense.json").read_text())
    shutil.unpack_archive(dense_fixture.FOLDER / "dense.tar.xz", tmp_path)
    with engines.engine_of(dense_fixture.config()) as engine:
        state = DenseState(
            model_chunks=engine.model_chunks,
            optimizer=engine.optimizer,
            scheduler=engine.scheduler,
            host=engine.train_state(),
        )
        dense_fixture.open_manager(engine, tmp_path).load(state, tmp_path / dense_fixture.NAME)
        engine.restore(state.host)
        assert engine.history.losses and state.extra == {"num_skipped": 3} and state.consumed_samples == 8
        found = dense_fixture.digests(engine)
        assert len(found) > 30
        assert found == expected

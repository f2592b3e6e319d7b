"""Under FSDP2 only the actor is gathered to generate."""

import json

import pytest

from runs import REPOSITORY, config_launcher, launch, tiny_llama


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """What each of two processes said."""
    folder = tmp_path_factory.mktemp("loading")
    model = tiny_llama(folder / "model")
    script = REPOSITORY / "tests/loading.py"
    result = launch(config_launcher("fsdp2", 2), script, model, folder / "out")
    found = {}
    for line in result.stdout.splitlines():
        if line.startswith("FOUND "):
            _, rank, values = line.split(maxsplit=2)
            found[int(rank)] = json.loads(values)
    return found


def test_only_the_actor_is_gathered_to_generate(loaded):
    for rank in (0, 1):
        cut = loaded[rank]["cut while it generates"]
        assert cut == {"actor": [False, False], "critic": [True, True]}


def test_after_generation_weights_are_sharded_when_they_were_before(loaded):
    """After a forward pass: those of the layers, not the root's, or none, as the launch config says."""
    for rank in (0, 1):
        in_training, after_generation, without_resharding = loaded[rank]["cut after forward"]
        assert any(in_training) and not all(in_training)
        assert after_generation == in_training
        assert without_resharding == [False] * len(in_training)

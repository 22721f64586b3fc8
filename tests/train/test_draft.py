"""The draft layer in training: what steps see, its loop, the export as the engine reads it."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the training half needs torch (pip install 'twoends[train]')")

from tests.train.models import tiny_architecture  # noqa: E402
from tests.train.test_export import RANKS  # noqa: E402
from twoends.checkpoint.config import read_config  # noqa: E402
from twoends.checkpoint.draft_file import DraftFile  # noqa: E402
from twoends.errors import CheckpointError, OptionError  # noqa: E402
from twoends.kernels.reference import reference_ops  # noqa: E402
from twoends.model.draft_layer import DraftWeights, draft_logits, draft_rows, join_features  # noqa: E402
from twoends.model.mla import MlaPart  # noqa: E402
from twoends.model.state import MlaState  # noqa: E402
from twoends.train.draft_eval import as_stored, evaluate_drafts  # noqa: E402
from twoends.train.draft_export import card_text, draft_config, export_draft, target_identity  # noqa: E402
from twoends.train.draft_layer import DraftLayer, visible_bases  # noqa: E402
from twoends.train.draft_loop import DraftBatch, DraftRun, DraftText, train_draft  # noqa: E402
from twoends.train.draft_recipe import DraftRecipe, draft_preset, parse_draft_recipe  # noqa: E402
from twoends.train.export import export_checkpoint, load_checkpoint  # noqa: E402
from twoends.train.model import KimiK3  # noqa: E402
from twoends.train.recipe import preset, recipe_text  # noqa: E402

EOS = 345
FEATURES = ("final", "block.0", "block.2")
WIDTH = 32


def recipe(**changes) -> DraftRecipe:
    """Seconds on the tiny architecture."""
    given = draft_preset()
    settings = {"steps": 5, "batch_rows": 2, "row_tokens": 24, "matmul_dtype": "float32", "heldout_rows": 2}
    return dataclasses.replace(
        given,
        draft=dataclasses.replace(given.draft, features=FEATURES, mlp_width=40, unrolled_steps=3),
        train=dataclasses.replace(given.train, **(settings | changes)),
    )


def text(*, tokens: int = 24) -> DraftText:
    ids = np.random.default_rng(0).integers(0, 344, (9, tokens + 1)).astype(np.uint16)
    ids[:, 14] = EOS
    return DraftText(rows=ids, heldout={"noise": ids[:2]})


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """A checkpoint of random numbers with every K3 part, and its tokenizer."""
    directory = tmp_path_factory.mktemp("target") / "tiny"
    export_checkpoint(KimiK3(tiny_architecture()).initialise(1).eval(), directory, ranks=RANKS)
    return directory


def new_run(target: Path, out: Path, **changes) -> DraftRun:
    identity = target_identity(target)
    return DraftRun(recipe(**changes), load_checkpoint(target), text(), out, identity=identity)


def new_layer(seed: int = 3) -> DraftLayer:
    layer = DraftLayer(tiny_architecture(), num_features=2, mlp_width=40).initialise(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return layer.double()


def noise(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unrolled(
    layer: DraftLayer, features, embeddings, *, steps: int = 3, documents=None
) -> list[torch.Tensor]:
    documents = torch.zeros(embeddings.shape[:2], dtype=torch.long) if documents is None else documents
    with torch.no_grad():
        return layer.unrolled(features, embeddings, visible_bases(documents), steps=steps)


def test_the_unrolled_steps_are_what_guessing_one_id_after_the_other_gives() -> None:
    """Each base on its own: the rows of step 0 up to it, then row after row on its own output."""
    layer, tokens = new_layer(), 9
    features, embeddings = [noise(1, tokens, WIDTH, seed=i) for i in (1, 2)], noise(1, tokens, WIDTH, seed=3)
    found = unrolled(layer, features, embeddings)
    seen = torch.ones(1, tokens, tokens, dtype=torch.bool).tril()
    for base in (0, 3, 5):
        cache: list[tuple[torch.Tensor, torch.Tensor]] = []
        with torch.no_grad():
            normed = [norm(f[:, : base + 1]) for norm, f in zip(layer.feature_norms, features, strict=True)]
            g = layer.fc(torch.cat(normed, -1)).float()
            following = embeddings[:, 1 : base + 2]
            g = layer._step(g, following, cache, seen[:, : base + 1, : base + 1])
            torch.testing.assert_close(layer.norm(g[:, -1:]), found[0][:, base : base + 1])
            g = g[:, -1:]
            for s in (1, 2):
                keys, values = (torch.cat(parts, 2) for parts in zip(*cache, strict=True))
                rows = [(keys, values)]
                visible = torch.ones(1, 1, keys.shape[2], dtype=torch.bool)
                g = layer._step(g, embeddings[:, base + 1 + s : base + 2 + s], rows, visible)
                cache.append(rows[1])
                torch.testing.assert_close(layer.norm(g), found[s][:, base : base + 1])


def test_a_step_sees_no_token_that_it_predicts_and_no_other_document() -> None:
    layer, tokens = new_layer(), 12
    features, embeddings = [noise(1, tokens, WIDTH, seed=i) for i in (1, 2)], noise(1, tokens, WIDTH, seed=3)
    plain = unrolled(layer, features, embeddings)
    later = [f.clone() for f in features]
    for f in later:
        f[:, 6:] += 1
    after = embeddings.clone()
    after[:, 8:] += 1
    changed = unrolled(layer, later, after)
    for s in range(3):
        # Base t reads hidden states up to t and embeddings up to t + 1 + s.
        same = min(6, 7 - s)
        torch.testing.assert_close(changed[s][:, :same], plain[s][:, :same], rtol=0, atol=0)
        assert not torch.equal(changed[s][:, same], plain[s][:, same])
    documents = torch.tensor([[0] * 5 + [1] * 7])
    apart = unrolled(layer, features, embeddings, documents=documents)
    alone = unrolled(layer, [f[:, 5:] for f in features], embeddings[:, 5:])
    for s in range(3):
        torch.testing.assert_close(apart[s][:, 5:], alone[s])


def test_guesses_count_where_the_document_goes_on(target: Path) -> None:
    ids = np.array([[5, 6, 7, EOS, 8, 9, 1, 2, 3]])
    taught = DraftBatch(load_checkpoint(target).eval(), ids, features=FEATURES)
    # Step s of base t is tested behind token t + 1 + s, which must be of its document and not the end of it.
    assert taught.counted(0).tolist() == [[True, True, False, False, True, True, True]]
    assert taught.counted(1).tolist() == [[True, False, False, False, True, True]]
    assert taught.text(0).tolist() == [7, EOS, 1, 2, 3]
    torch.testing.assert_close(taught.expected(1)[0], taught.p_BTW[0, 2])


def test_every_parameter_learns_and_the_target_does_not(target: Path, tmp_path: Path) -> None:
    run = new_run(target, tmp_path)
    frozen = {name: value.clone() for name, value in run.target.state_dict().items()}
    taught = DraftBatch(run.target, text().rows[:2].astype(np.int64), features=FEATURES)
    layer = run.layers["acceptance"]
    run.loss(layer, taught, name="acceptance").backward()
    assert [name for name, p in layer.named_parameters() if p.grad is None or not p.grad.any()] == []
    run.step()
    assert all(torch.equal(value, frozen[name]) for name, value in run.target.state_dict().items())
    assert not any(p.requires_grad for p in run.target.parameters())


def test_layers_of_all_losses_begin_alike_and_the_loss_falls(target: Path, tmp_path: Path) -> None:
    run = new_run(target, tmp_path, steps=30, learning_rate=2e-2)
    first, second = (dict(layer.named_parameters()) for layer in run.layers.values())
    assert all(torch.equal(first[name], second[name]) for name in first)
    for _ in range(30):
        run.step()
    for name in run.layers:
        nats = [record[f"{name}_nats"] for record in run.losses]
        assert sum(nats[-3:]) < 0.9 * sum(nats[:3])


def bits(run: DraftRun) -> dict[str, torch.Tensor]:
    return run.layers.state_dict()


def test_a_run_that_is_resumed_ends_in_the_same_bits(target: Path, tmp_path: Path) -> None:
    whole = new_run(target, tmp_path / "whole")
    assert train_draft(whole)
    part = new_run(target, tmp_path / "part")
    assert not train_draft(part, should_stop=lambda: part.done_steps == 2)
    rest = new_run(target, tmp_path / "part")
    rest.restore()
    assert rest.done_steps == 2
    assert train_draft(rest)
    assert all(torch.equal(bits(whole)[name], value) for name, value in bits(rest).items())
    lines = [(tmp_path / name / "loss.jsonl").read_bytes() for name in ("whole", "part")]
    assert lines[0] == lines[1]


def test_a_snapshot_for_another_target_is_refused(target: Path, tmp_path: Path) -> None:
    run = new_run(target, tmp_path)
    run.save()
    other = DraftRun(
        recipe(),
        load_checkpoint(target),
        text(),
        tmp_path,
        identity={**target_identity(target), "weights": "0"},
    )
    with pytest.raises(OptionError, match=r"another \[target\]"):
        other.restore()


def export(run: DraftRun, target: Path, directory: Path) -> DraftFile:
    config = draft_config(run.recipe, target, identity=target_identity(target))
    card = card_text(config, run.recipe, evaluate_drafts(run, guesses={}), steps=run.done_steps)
    export_draft(run.layers["acceptance"], directory, config=config, target=target, card=card)
    return DraftFile.open(directory, read_config(target))


def test_the_engine_computes_what_was_trained(target: Path, tmp_path: Path) -> None:
    """Logits of step 0 and of two guessed rows, by the numpy definition; 1e-4 is what binary32 leaves."""
    run = new_run(target, tmp_path)
    run.step()
    file = export(run, target, tmp_path / "draft")
    ids = text().rows[:1, :12].astype(np.int64)
    taught = DraftBatch(run.target, ids, features=FEATURES)
    layer = as_stored(run.layers["acceptance"])
    with torch.no_grad():
        states = layer.unrolled(taught.features, taught.embeddings_BTD, taught.seen_BTT, steps=3)
        wanted = [(run.target.lm_head(state))[0].numpy() for state in states]
    head = run.target.lm_head.weight.detach().numpy()
    ops, config = reference_ops(), file.layer
    weights = DraftWeights(file.read(), [(0, 0, _matrix(head))])
    cache = MlaState(cache_CM=np.full((20, config.latent_row), np.nan, np.float32))
    features = np.stack([feature[0].numpy() for feature in taught.features])
    embeddings = taught.embeddings_BTD[0].numpy()
    bases = 8
    g = join_features(weights, np.ascontiguousarray(features[:, :bases]), config, ops)
    part = MlaPart(rows=slice(0, bases), state=cache, start=0, end=bases)
    h = draft_rows(weights, g, embeddings[1 : bases + 1], part, config, ops)
    np.testing.assert_allclose(draft_logits(weights, h, config, ops), wanted[0][:bases], rtol=0, atol=1e-4)
    h = h[-1:]
    for s in (1, 2):
        part = MlaPart(rows=slice(0, 1), state=cache, start=bases + s - 1, end=bases + s)
        h = draft_rows(weights, h, embeddings[bases + s : bases + s + 1], part, config, ops)
        found = draft_logits(weights, h, config, ops)
        np.testing.assert_allclose(found, wanted[s][bases - 1 : bases], rtol=0, atol=1e-4)


def _matrix(values: np.ndarray):
    from twoends.kernels.ops import Matrix

    data = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint8)
    return Matrix(format="f32", rows=values.shape[0], cols=values.shape[1], data=data)


def test_the_folder_says_what_it_is_for(target: Path, tmp_path: Path) -> None:
    run = new_run(target, tmp_path)
    file = export(run, target, tmp_path / "draft")
    assert file.config.features == FEATURES
    assert file.config.target_config == read_config(target).digest
    card = (tmp_path / "draft" / "README.md").read_text()
    for heading in ("How it was made", "How often it is right"):
        assert f"\n## {heading}\n" in card
    assert "| acceptance | greedy |" in card
    assert sorted(path.name for path in (tmp_path / "draft").iterdir()) == [
        "README.md", "config.json", "draft.safetensors",
    ]  # fmt: skip


def test_a_layer_that_is_not_finite_is_not_exported(target: Path, tmp_path: Path) -> None:
    run = new_run(target, tmp_path)
    config = draft_config(run.recipe, target, identity=target_identity(target))
    with torch.no_grad():
        run.layers["acceptance"].fc.weight[0, 0] = math.inf
    with pytest.raises(CheckpointError, match=r"fc\.weight"):
        export_draft(run.layers["acceptance"], tmp_path / "d", config=config, target=target, card="")
    assert not (tmp_path / "d").exists()


def test_a_hidden_state_that_the_target_has_not_is_refused(target: Path) -> None:
    given = recipe()
    wrong = dataclasses.replace(given, draft=dataclasses.replace(given.draft, features=("block.3",)))
    with pytest.raises(OptionError, match=r"no hidden state 'block\.3'") as error:
        draft_config(wrong, target, identity=target_identity(target))
    assert error.value.evidence == (("known", "block.0, block.1, block.2, final"),)


def test_a_guess_that_is_always_the_targets_own_is_always_kept(target: Path, tmp_path: Path) -> None:
    """An oracle through the guess interface: what is guessed after an id lands on the right place."""
    run = new_run(target, tmp_path)
    run.text.heldout["noise"] = run.text.rows[:1]
    taught = DraftBatch(run.target, run.text.rows[:1].astype(np.int64), features=FEATURES)
    likeliest = taught.p_BTW[0].argmax(-1).tolist()
    begins = {0: 0, 15: 15}

    def oracle(ids: list[int], count: int) -> list[list[int]]:
        begin = next(b for b in begins if taught.inputs_BT[0, b : b + len(ids)].tolist() == ids)
        return [likeliest[begin + n : begin + n + count] for n in range(len(ids))]

    found = evaluate_drafts(run, guesses={"oracle": oracle, "nothing": lambda ids, count: [[] for _ in ids]})
    assert found["oracle"].greedy == [1.0] * 3
    assert found["oracle"].kept == 4.0
    assert found["nothing"].guessed == [0.0] * 3
    assert found["nothing"].kept == 1.0
    assert all(0 < rate < 1 for rate in found["acceptance"].overlap)


def test_the_recipe_is_read_back_and_a_model_preset_stays_what_it_was() -> None:
    given = draft_preset()
    assert parse_draft_recipe(recipe_text(given), path=Path("r")) == given
    with pytest.raises(OptionError, match="--draft-of MODEL"):
        preset("draft")
    with pytest.raises(OptionError, match="there is ablation, nano, ten"):
        preset("giant")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"acceptance", ', '"acceptence", ', "no loss 'acceptence'"),
        ('"cross-entropy"', '"acceptance"', "each once"),
        ("steps = 4", "steps = 400", "unrolled_steps is 400"),
        ("mlp_width = 256", "", "misses keys"),
        ("[draft]", "[draught]", "unknown sections"),
        ("seed = 1", 'seed = "1"', "wants int for seed"),
    ],
)
def test_a_wrong_recipe_is_refused(old: str, new: str, message: str) -> None:
    import importlib.resources

    folder = importlib.resources.files("twoends.train").joinpath("recipes")
    original = folder.joinpath("draft.toml").read_text(encoding="utf-8")
    assert old in original
    with pytest.raises(OptionError, match=message):
        parse_draft_recipe(original.replace(old, new, 1), path=Path("r.toml"))


def twoends(*words: object) -> subprocess.CompletedProcess[str]:
    """A process of its own: training asks for things before torch is loaded."""
    command = [sys.executable, "-m", "twoends", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def test_the_command_trains_resumes_exports_and_the_engine_drafts(target: Path, tmp_path: Path) -> None:
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    stories = ["abababcacacadbdbdb" * 6 + str(n) for n in range(40)]
    for split in ("train", "heldout"):
        (data / f"mine.{split}.jsonl").write_text("".join(json.dumps(s) + "\n" for s in stories))
    mine = dataclasses.replace(recipe().data, shares={"mine": 1.0}, characters=9000)
    (tmp_path / "r.toml").write_text(recipe_text(dataclasses.replace(recipe(), data=mine)))
    words = [
        "train",
        tmp_path / "r.toml",
        "--draft-of",
        target,
        "--out",
        out,
        "--data",
        data,
        "--threads",
        "1",
    ]
    stopped = twoends(*words, "--minutes", "1e-9")
    assert (stopped.returncode, "--resume" in stopped.stdout) == (0, True), stopped.stderr
    refused = twoends(*words)
    assert (refused.returncode, "add --resume" in refused.stderr) == (2, True)
    done = twoends(*words, "--resume", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["steps"], found["exported"]) == (5, "acceptance")
    assert set(found["rates"]) == {"acceptance", "cross-entropy", "prompt lookup"}
    assert (out / "report.md").read_text().count("\n| ") > 8
    ran = twoends("run", target, "abab", "-n", "4", "--draft-model", found["draft"], "--json")
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["draft_model"]["model"] == found["draft"]


def test_a_preset_of_a_model_is_refused_for_a_draft(target: Path, tmp_path: Path) -> None:
    done = twoends("train", "--draft-of", target, "--out", tmp_path / "out", "--preset", "nano")
    assert (done.returncode, done.stderr) == (2, "twoends: --draft-of goes with --preset draft, not nano.\n")

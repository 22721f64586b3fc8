"""The optional layer that predicts the token after the next, and the two terms of the loss."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="the training half needs torch (pip install 'twoends[train]')")

from safetensors.torch import load_file  # noqa: E402

from tests.train.models import tiny_architecture  # noqa: E402
from tests.train.test_export import RANKS  # noqa: E402
from twoends.train.export import export_checkpoint  # noqa: E402
from twoends.train.model import KimiK3  # noqa: E402
from twoends.train.mtp import MTP_WEIGHT, second_targets  # noqa: E402
from twoends.train.packing import documents_of_lengths, documents_of_rows  # noqa: E402


def _model() -> KimiK3:
    return KimiK3(tiny_architecture(), mtp=True).initialise(3).train()


def _ids() -> torch.Tensor:
    return torch.randint(0, 600, (2, 33), generator=torch.Generator().manual_seed(1))


def test_the_second_target_is_the_token_after_the_next() -> None:
    targets = torch.tensor([[11, 12, 13, -1, 15]])
    assert second_targets(targets, None, ignore=-1).tolist() == [[12, 13, -1, -1, -1]]


def test_the_second_target_stays_within_the_document() -> None:
    ids = torch.tensor([[5, 6, 9, 7, 8, 9]])
    documents = documents_of_rows(ids, eos=9)
    targets = torch.tensor([[6, 9, 7, 8, 9, 4]])
    assert documents.tolist() == [[0, 0, 0, 1, 1, 1]]
    assert second_targets(targets, documents, ignore=-1).tolist() == [[9, 7, -1, 9, 4, -1]]


def test_it_is_off_by_default_and_changes_no_weight_of_the_rest() -> None:
    plain, more = KimiK3(tiny_architecture()).initialise(3).state_dict(), _model().state_dict()
    assert not any(name.startswith("mtp") for name in plain)
    assert all(torch.equal(plain[name], more[name]) for name in plain)


def test_its_loss_is_added_with_its_weight_in_training_only() -> None:
    model, ids = _model(), _ids()
    terms = model.loss_terms(ids[:, :-1], ids[:, 1:], ignore=-1)
    _, second = model(ids[:, :-1], None, ids[:, 1:])
    nats = torch.nn.functional.cross_entropy(
        second[:, :-1].flatten(0, 1), ids[:, 2:].flatten(), reduction="sum"
    )
    torch.testing.assert_close(terms.extra, MTP_WEIGHT * nats)
    assert not model.eval().loss_terms(ids[:, :-1], ids[:, 1:], ignore=-1).extra


def test_it_does_not_see_the_token_it_predicts() -> None:
    model, ids = _model().double().eval(), _ids()
    changed = ids.clone()
    changed[:, 20:] = (changed[:, 20:] + 5) % 600
    with torch.no_grad():
        found, wanted = (model(x[:, :-1], None, x[:, 1:])[1][:, :19] for x in (changed, ids))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_every_parameter_of_it_learns() -> None:
    model, ids = _model(), _ids()
    model.loss(ids[:, :-1], ids[:, 1:], ignore=-1).backward()
    assert all(p.grad is not None and p.grad.any() for p in model.mtp.parameters())


def test_the_exported_checkpoint_is_that_of_the_model_without_it(tmp_path: Path) -> None:
    export_checkpoint(_model(), tmp_path / "mtp", ranks=RANKS)
    export_checkpoint(KimiK3(tiny_architecture()).initialise(3), tmp_path / "plain", ranks=RANKS)
    for file in sorted((tmp_path / "plain").iterdir()):
        assert file.read_bytes() == (tmp_path / "mtp" / file.name).read_bytes(), file.name
    assert load_file(tmp_path / "mtp" / "model-00008-of-000008.safetensors")


def test_micro_batches_add_up_to_the_batch() -> None:
    model, ids = _model(), _ids()
    ids[0, 20:] = 7
    targets = ids[:, 1:].clone()
    targets[0, 20:] = -1
    documents = torch.cat([documents_of_lengths(torch.tensor([0, n]), tokens=32) for n in (20, 32)])
    whole = model.loss_terms(ids[:, :-1], targets, ignore=-1, documents_BT=documents)
    parts = [
        model.loss_terms(
            ids[i : i + 1, :-1], targets[i : i + 1], ignore=-1, documents_BT=documents[i : i + 1]
        )
        for i in (0, 1)
    ]
    torch.testing.assert_close(sum(part.text for part in parts), whole.text)
    torch.testing.assert_close(sum(part.extra for part in parts), whole.extra)


def test_asking_a_model_without_it_is_refused() -> None:
    with pytest.raises(RuntimeError, match="mtp=True"):
        KimiK3(tiny_architecture())(_ids(), None, _ids())

"""``KFACCallback`` in the real ``Trainer`` of transformers, and in a trainer of TRL."""

import copy

import pytest
import torch

import dkfac
from dkfac.capture.collector import Collector

transformers = pytest.importorskip("transformers", reason="the extra dkfac[transformers] is not installed")
pytest.importorskip("transformers.trainer", reason="the Trainer cannot be imported: is Accelerate installed?")

from dkfac.integrations.huggingface import KFACCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of the library's own

EVERY_STEP = {"announce": False, "factor_interval": 1, "inverse_interval": 1}
LENGTH = 10


def make_llama(seed=0):
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def rows(number=16, *, ragged=True):
    """Sequences padded to one length, with a different number of labels in each."""
    draw = torch.Generator().manual_seed(0)
    found = []
    for i in range(number):
        tokens = torch.randint(1, 32, (LENGTH,), generator=draw)
        length = LENGTH - (i * 3) % 7 if ragged else LENGTH
        real = (torch.arange(LENGTH) < length).long()
        labels = torch.where(real.bool(), tokens, -100)
        labels[:2] = -100 if ragged and i % 2 else labels[:2]  # a prompt
        found.append({"input_ids": tokens * real, "attention_mask": real, "labels": labels})
    return found


def train(folder, callback, *, model=None, steps=4, batch=4, accumulation=1, resume=None, data=None, **options):
    given = {
        "output_dir": str(folder), "max_steps": steps, "per_device_train_batch_size": batch, "use_cpu": True,
        "gradient_accumulation_steps": accumulation, "learning_rate": 1e-2, "lr_scheduler_type": "constant",
        "report_to": [], "disable_tqdm": True, "logging_steps": 2, "save_steps": 2, "dataloader_pin_memory": False,
    }  # fmt: skip
    args = transformers.TrainingArguments(**(given | options))
    model = make_llama() if model is None else model
    trainer = transformers.Trainer(model=model, args=args, train_dataset=data or rows(), callbacks=[callback])
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_it_attaches_trains_logs_and_detaches(tmp_path, monkeypatch):
    seen = []
    callback = KFACCallback(logger=lambda found, step: seen.append((step, found)), **EVERY_STEP)
    trainer = train(tmp_path, callback)
    assert callback.kfac.metrics()["step"] == 4
    assert sum("mlp" in name for name in callback.kfac.factors()) == 3
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in logged] == [2, 4]
    assert all(entry["kfac_update_norm"] > 0 for entry in logged)
    assert [step for step, _ in seen] == [2, 4]
    monkeypatch.setattr(Collector, "set_terms", None)  # called by a hook that is left
    trainer.model.train()(**{key: value[None] for key, value in rows(1)[0].items()})
    dkfac.KFAC(trainer.model, torch.optim.SGD(trainer.model.parameters(), lr=0.1), announce=False)


def factors_after_one_step(folder, *, batch, accumulation, model=None, data=None, **options):
    callback = KFACCallback(**{"curvature": "kfac", "damping": 1e-2} | EVERY_STEP | options)
    model = make_llama().double() if model is None else model
    given = {"steps": 1, "batch": batch, "accumulation": accumulation, "data": data, "max_grad_norm": 0.0}
    train(folder, callback, model=model, save_strategy="no", train_sampling_strategy="sequential", **given)
    return callback.kfac.factors()


def assert_same_factors(found, wanted):
    for name, factors in wanted.items():
        for key, value in factors.items():
            torch.testing.assert_close(found[name][key], value, rtol=1e-6, atol=1e-12, msg=f"{name} {key}")


@pytest.mark.parametrize("accumulation", [2, 4])
def test_terms_are_the_labels_that_count_however_the_batch_is_accumulated(accumulation, tmp_path):
    """The ``Trainer`` divides sums over micro-batches by the number of labels in all of them."""
    whole = factors_after_one_step(tmp_path, batch=8, accumulation=1)
    parts = factors_after_one_step(tmp_path, batch=8 // accumulation, accumulation=accumulation)
    assert_same_factors(parts, whole)


def test_the_factors_are_those_of_a_plain_loop_that_counts_its_labels(tmp_path):
    found = factors_after_one_step(tmp_path, batch=8, accumulation=2)
    model = make_llama().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    kfac = dkfac.KFAC(model, optimizer, curvature="kfac", damping=1e-2, **EVERY_STEP)
    batch = {key: torch.stack([row[key] for row in rows(16)]) for key in rows(1)[0]}
    labels = batch.pop("labels")
    counts = labels[:, 1:].ne(-100)
    kfac.set_terms(float(counts.sum()), batch["attention_mask"])
    logits = model(**batch).logits[:, :-1].float()  # as the library does
    torch.nn.functional.cross_entropy(logits[counts], labels[:, 1:][counts]).backward()
    optimizer.step()
    assert_same_factors(found, kfac.factors())


def test_a_model_that_does_not_take_the_number_of_items_is_averaged_over_micro_batches(tmp_path):
    model = make_llama().double()
    model.accepts_loss_kwargs = False
    data = rows(8, ragged=False)
    parts = factors_after_one_step(tmp_path, batch=2, accumulation=4, model=copy.deepcopy(model), data=data)
    whole = factors_after_one_step(tmp_path, batch=8, accumulation=1, model=model, data=data)
    assert_same_factors(parts, whole)


def test_labels_of_a_classifier_are_counted_as_examples(tmp_path):
    torch.manual_seed(0)
    width = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.BertConfig(
        vocab_size=32, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **width
    )
    model = transformers.BertForSequenceClassification(config).double()
    data = [row | {"labels": torch.tensor(i % 3)} for i, row in enumerate(rows(8, ragged=False))]
    found = factors_after_one_step(tmp_path, batch=8, accumulation=1, model=copy.deepcopy(model), data=data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    kfac = dkfac.KFAC(model, optimizer, curvature="kfac", damping=1e-2, **EVERY_STEP)
    model(**{key: torch.stack([row[key] for row in data]) for key in data[0]}).loss.backward()
    optimizer.step()
    assert_same_factors(found, kfac.factors())


@pytest.mark.parametrize("where", ["same folder", "another folder"])
def test_training_resumes_bitwise_from_a_checkpoint(where, tmp_path):
    whole = train(tmp_path / "whole", KFACCallback(**EVERY_STEP), steps=6)
    folder = tmp_path / "parts"
    train(folder, KFACCallback(**EVERY_STEP), steps=4)
    checkpoint = folder / "checkpoint-4"
    assert (checkpoint / "kfac.pt").exists()
    out, options = (folder, {}) if where == "same folder" else (tmp_path / "new", {"resume_from": checkpoint})
    callback = KFACCallback(**EVERY_STEP, **options)
    resumed = train(out, callback, steps=6, resume=str(checkpoint), model=make_llama(seed=1))
    assert callback.kfac.metrics()["step"] == 6
    for p, q in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(p, q)


def test_a_checkpoint_without_kfacs_state_is_said(tmp_path):
    train(tmp_path, KFACCallback(**EVERY_STEP))
    (tmp_path / "checkpoint-4" / "kfac.pt").unlink()
    (tmp_path / "checkpoint-4" / "optimizer.pt").unlink()  # has it, too
    with pytest.warns(UserWarning, match=r"resumes at step 4.*start anew.*resume_from"):
        train(tmp_path, KFACCallback(**EVERY_STEP), steps=5, resume=str(tmp_path / "checkpoint-4"))


def test_a_trainer_that_trains_again_attaches_again(tmp_path):
    callback = KFACCallback(**EVERY_STEP)
    trainer = train(tmp_path, callback)
    first = callback.kfac
    trainer.train()
    assert callback.kfac is not first
    assert callback.kfac.metrics()["step"] == 4


def test_trl(tmp_path):
    trl = pytest.importorskip("trl", reason="TRL is not installed")
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    words = {f"w{i}": i for i in range(31)} | {"<pad>": 31}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="w1")
    data = [{"input_ids": row["input_ids"].tolist(), "labels": row["labels"].tolist()} for row in rows(8)]
    args = trl.SFTConfig(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        use_cpu=True, report_to=[], disable_tqdm=True, bf16=False, save_strategy="no", logging_steps=1,
        dataloader_pin_memory=False, learning_rate=1e-2, gradient_checkpointing=False, loss_type="nll",
    )  # fmt: skip
    callback = KFACCallback(**EVERY_STEP)
    trainer = trl.SFTTrainer(
        model=make_llama(), args=args, train_dataset=datasets.Dataset.from_list(data), processing_class=tokenizer,
        callbacks=[callback],
    )  # fmt: skip
    trainer.train()
    assert callback.kfac.metrics()["step"] == 3
    assert all(entry["kfac_update_norm"] > 0 for entry in trainer.state.log_history if "loss" in entry)

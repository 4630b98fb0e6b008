"""Tiny models of the transformers library train with Adam in the eigenbasis and with K-FAC into AdamW."""

import fnmatch

import pytest
import torch

import dkfac

transformers = pytest.importorskip("transformers", reason="the extra dkfac[transformers] is not installed")

pytestmark = pytest.mark.filterwarnings("ignore")  # of the library's own


def tokens(kinds=50, shape=(4, 12)):
    return torch.randint(3, kinds, shape, generator=torch.Generator().manual_seed(0))


def language(**inputs):
    given = {"input_ids": tokens(), **inputs}
    return given | {"labels": given["input_ids"].clone()}


def images():
    generator = torch.Generator().manual_seed(0)
    return {"pixel_values": torch.randn(8, 3, 32, 32, generator=generator), "labels": torch.arange(8) % 3}


WIDTH = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
MODELS = {
    "gpt2": lambda t: (
        t.GPT2LMHeadModel(
            t.GPT2Config(
                vocab_size=50, n_positions=16, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
                attn_pdrop=0.0, bos_token_id=0, eos_token_id=1,
            )
        ),
        language(),
    ),
    "bert": lambda t: (
        t.BertForMaskedLM(t.BertConfig(vocab_size=50, max_position_embeddings=16, **WIDTH, **QUIET)),
        language(attention_mask=(torch.arange(12) < torch.tensor([[12], [9], [12], [5]])).long()),
    ),
    "llama": lambda t: (  # grouped queries, RMS norm
        t.LlamaForCausalLM(t.LlamaConfig(vocab_size=50, max_position_embeddings=16, num_key_value_heads=2, **WIDTH)),
        language(),
    ),
    "vit": lambda t: (
        t.ViTForImageClassification(t.ViTConfig(image_size=32, patch_size=8, num_labels=3, **WIDTH, **QUIET)),
        images(),
    ),
    "convnext": lambda t: (
        t.ConvNextForImageClassification(
            t.ConvNextConfig(num_labels=3, hidden_sizes=[8, 16, 16, 16], depths=[1, 1, 1, 1], image_size=32)
        ),
        images(),
    ),
    "t5": lambda t: (
        t.T5ForConditionalGeneration(
            t.T5Config(
                vocab_size=50, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout_rate=0.0,
                decoder_start_token_id=0, pad_token_id=0,
            )
        ),
        language(),
    ),
}  # fmt: skip
LEFT = {
    "gpt2": ["transformer.wte", "lm_head"],
    "bert": ["bert.embeddings.*", "cls.predictions.decoder"],
    "llama": ["model.embed_tokens", "lm_head"],
    "t5": ["shared", "lm_head", "*.embed_tokens"],
}
"""Of the size of the vocabulary, and tied: the optimizer's own."""


def build(name):
    torch.manual_seed(0)
    return MODELS[name](transformers)


def train(name, steps=20, *, lr=3e-3, checkpointing=False, clip=None, freeze=None, **options):
    model, inputs = build(name)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if freeze is not None:
        freeze(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=lr)
    terms = "batch" if "pixel_values" in inputs else "token"
    options = {"factor_interval": 2, "inverse_interval": 4, "loss_terms": terms, "skip": LEFT.get(name, ())} | options
    losses = []
    with dkfac.KFAC(model, optimizer, announce=False, **options) as kfac:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(**inputs).loss
            loss.backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(trained, clip)
            optimizer.step()
            losses.append(float(loss.detach()))
        assert all(torch.isfinite(p).all() for p in model.parameters())
        names = {layer.name for layer in kfac.layers if kfac.factors()[layer.name]}
        metrics = kfac.metrics()
    return losses, model, names, metrics


@pytest.mark.parametrize(
    "options", [{"curvature": "adam-eigen"}, {"damping_mode": "relative", "damping": 0.01}], ids=str
)
@pytest.mark.parametrize("name", MODELS)
def test_a_tiny_model_learns_its_batch(name, options):
    losses, model, names, metrics = train(name, **options)
    assert losses[-1] < 0.8 * losses[0]
    assert metrics["skipped_batches"] == metrics["fallbacks_raw"] == 0
    inner = {n for n, m in model.named_modules() if isinstance(m, (torch.nn.Linear, torch.nn.Conv2d))}
    inner |= {n for n, m in model.named_modules() if type(m).__name__ == "Conv1D"}
    left = {n for n in inner if any(fnmatch.fnmatchcase(n, pattern) for pattern in LEFT.get(name, ()))}
    unused = {n for n in inner if model.get_submodule(n).weight.grad is None}
    assert inner - left - unused <= names


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_checkpointing_changes_nothing(name):
    plain, *_ = train(name, 8, curvature="adam-eigen")
    again, *_ = train(name, 8, curvature="adam-eigen", checkpointing=True)
    assert again == pytest.approx(plain, rel=1e-5)


def test_clipped_gradients_are_what_adam_sees():
    losses, *_ = train("llama", clip=0.1, curvature="adam-eigen")
    assert losses[-1] < 0.8 * losses[0]


def test_a_frozen_backbone_with_a_trained_part_is_stepped_there_alone():
    """As adapters are trained: the rest keeps its bits and has no statistics."""

    def freeze(model):
        for name, p in model.named_parameters():
            p.requires_grad_("mlp" in name)

    before = {name: p.clone() for name, p in build("llama")[0].named_parameters()}
    losses, model, names, _ = train("llama", freeze=freeze, curvature="adam-eigen")
    assert losses[-1] < losses[0]
    assert names
    assert all("mlp" in name for name in names)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) == ("mlp" not in name)


def test_in_bfloat16_it_learns():
    torch.manual_seed(0)
    model, inputs = build("llama")
    model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with dkfac.KFAC(model, optimizer, announce=False, curvature="adam-eigen", loss_terms="token", skip=LEFT["llama"]):
        losses = []
        for _ in range(20):
            optimizer.zero_grad()
            loss = model(**inputs).loss
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]

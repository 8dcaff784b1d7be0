#!/usr/bin/env python3
"""Makes test/reference/NAME.safetensors: what Hugging Face's GPT-Neo and GPT-2 compute on small odd shapes.

    python dev/reference/make_reference.py            writes the files and prints what fp32 rounding does to the values
    python dev/reference/make_reference.py --check    recomputes and compares with the files, exit 1 where they differ

Everything is computed in float64 and rounded to float32 once, when it is stored, so the values have no rounding of
their own and a float32 program may be compared as tightly as its own rounding allows.

WEIGHTS are not stored. Every one is an exact float32 that any language makes bit for bit from its Hugging Face name:

    state = FNV1a64(name) XOR seed                  seed: of the configuration, in the file's metadata
    for element 0, 1, 2 ... in row-major order of the tensor as Hugging Face stores it, Linear weights (out, in), Conv1D (in, out):
        state += 0x9E3779B97F4A7C15                                                       (all arithmetic modulo 2^64)
        z = state;  z = (z ^ z>>30) * 0xBF58476D1CE4E5B9;  z = (z ^ z>>27) * 0x94D049BB133111EB;  z = z ^ z>>31
        value = ((z >> 48) - 32768) / 32768 * scale                                       uniform in [-scale, scale)
    LayerNorm weights are 1 + value.

    FNV1a64(name): hash = 0xCBF29CE484222325; for every byte: hash = (hash ^ byte) * 0x100000001B3

16 bits and scales that are powers of two keep even 1 + value exact in float32. The scale depends on the kind of tensor:
scale_embeddings (wte, wpe), scale_matrices (Linear weights), scale_biases (every bias), scale_layernorm (LayerNorm
weights), all in the metadata. Weights are ten times as large as in training, so that attention is far from uniform and
GELU far from linear: a window off by one moves some logit by more than 1, GELU's erf form by 1e-3.

TOKENS come from the same stream, under the name "tokens": z modulo the vocabulary, B rows of T+1; the first T are the
input, the last T the targets. `masked` turns targets into -1 (does not count) under the name "masked". Both are stored.

The file's contents are listed in README.md beside this script.
"""

import argparse
import json
import pathlib
import sys
from dataclasses import asdict, dataclass

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoConfig, GPTNeoForCausalLM
from transformers.models.gpt_neo.modeling_gpt_neo import GPTNeoSelfAttention

STEPS = 10
LEARNING_RATE, BETA1, BETA2, WEIGHT_DECAY = 1e-3, 0.9, 0.95, 0.1
LAYER_NORM_EPSILON = 1e-5
WORD = (1 << 64) - 1


@dataclass(frozen=True)
class Reference:
    """One configuration; field names are the metadata keys of its file."""

    name: str
    why: str
    batch_size: int
    sequence_length: int
    layers: str  # one letter each: g global, l local
    channels: int
    heads: int
    inner: int
    window: int  # 0: it is a GPT-2
    positions: int
    vocabulary: int
    seed: int
    scale_matrices: float
    masked: str  # which targets are -1: "none", or "some" (about a quarter, and the whole second row)
    scale_embeddings: float = 0.5
    scale_biases: float = 0.125
    scale_layernorm: float = 0.25
    epsilon: float = 1e-8  # AdamW's. A bias of GPT-2's keys moves no probability: its gradient is 0 but for rounding,
    # which AdamW would enlarge to steps of full length


REFERENCES = (
    Reference("window_below_length", "local window cuts; four heads of 8; odd T, V, inner; spare positions",
              2, 23, "gl", 32, 4, 33, 5, 29, 61, 1, 0.25, "none"),
    Reference("window_above_length", "one head of 64; window never cuts; one sequence, as long as the positions",
              1, 37, "gl", 64, 1, 17, 64, 37, 101, 2, 0.125, "none"),
    Reference("masked_targets", "odd B and L; targets that do not count, one row without any that does",
              3, 19, "glg", 24, 3, 27, 7, 31, 97, 3, 0.25, "some"),
    Reference("gpt2_three_heads", "GPT-2; three heads of 3; spare positions",
              2, 7, "gg", 9, 3, 14, 0, 8, 19, 4, 0.5, "none", epsilon=1e-5),
    Reference("gpt2_one_head", "GPT-2; one head of 10; inner below C; one sequence, as long as the positions",
              1, 12, "g", 10, 1, 5, 0, 12, 23, 5, 0.5, "none", epsilon=1e-5),
    Reference("gpt2_masked_targets", "GPT-2; three layers, two heads of 3; targets that do not count",
              3, 7, "ggg", 6, 2, 11, 0, 9, 17, 6, 0.5, "some", epsilon=1e-5),
    Reference("gpt2_wide_head", "GPT-2; two heads of 7; V below C",
              1, 5, "g", 14, 2, 29, 0, 6, 13, 7, 0.25, "none", epsilon=1e-5),
)


# ----------------------------------------------------------------------------------------
# the exact formula


def fnv1a(name):
    """64-bit FNV-1a of the bytes of a name: gives each tensor its own stream without any agreed order of tensors."""
    value = 0xCBF29CE484222325
    for byte in name.encode():
        value = ((value ^ byte) * 0x100000001B3) & WORD
    return value


def splitmix(name, seed, count):
    """The first `count` words of the splitmix64 stream of (name, seed)."""
    state = (fnv1a(name) ^ seed) + 0x9E3779B97F4A7C15 * np.arange(1, count + 1, dtype=object)
    z = np.array([int(word) & WORD for word in state], dtype=np.uint64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def scale_of(name, reference):
    """(constant, scale) of a tensor: its values are constant + uniform[-scale, scale)."""
    if name.endswith(".bias"):
        return 0.0, reference.scale_biases
    if ".ln_" in name:
        return 1.0, reference.scale_layernorm
    if ".wte." in name or ".wpe." in name:
        return 0.0, reference.scale_embeddings
    return 0.0, reference.scale_matrices


def stream(name, seed, shape, scale, constant=0.0):
    """One tensor by the formula in the head of this file, in float64; asserts that float32 holds it exactly."""
    bits = (splitmix(name, seed, int(np.prod(shape))) >> np.uint64(48)).astype(np.int64)
    values = constant + (bits - 32768) / 32768.0 * scale
    assert np.array_equal(values.astype(np.float32).astype(np.float64), values)
    return torch.from_numpy(values.reshape(shape))


def make_weights(name, shape, reference):
    """A tensor of the model of that name."""
    constant, scale = scale_of(name, reference)
    return stream(name, reference.seed, shape, scale, constant)


def make_batch(reference):
    """(tokens, targets), both (B, T) int64; targets are the tokens that follow, -1 where they do not count."""
    B, T, V = reference.batch_size, reference.sequence_length, reference.vocabulary
    stream = (splitmix("tokens", reference.seed, B * (T + 1)) % np.uint64(V)).astype(np.int64).reshape(B, T + 1)
    tokens, targets = stream[:, :-1].copy(), stream[:, 1:].copy()
    if reference.masked == "some":
        dropped = (splitmix("masked", reference.seed, B * T) >> np.uint64(62)) == 0
        targets[dropped.reshape(B, T)] = -1
        targets[1] = -1
    return torch.from_numpy(tokens), torch.from_numpy(targets)


# ----------------------------------------------------------------------------------------
# the model


class DoubleAttention(GPTNeoSelfAttention):
    """Hugging Face's attention without its cast to float32.

    It casts query and key to float32 whatever the model's dtype (for fp16's sake), which in a float64 model is the one
    place that rounds. `disagreement` measures against the class as it is, and against the formulas written out.
    """

    def _attn(self, query, key, value, attention_mask=None):
        scores = query @ key.transpose(-1, -2)
        keep = self.bias[:, :, : query.size(-2), : key.size(-2)]
        weights = scores.masked_fill(~keep, -torch.inf).softmax(dim=-1)
        return weights @ value, weights


def attention_types(layers):
    """Hugging Face's nested spelling of a pattern such as "glg"."""
    return [[[{"g": "global", "l": "local"}[letter]], 1] for letter in layers]


def gpt2_config(reference):
    """Of a GPT-2."""
    return GPT2Config(
        vocab_size=reference.vocabulary, n_positions=reference.positions, n_embd=reference.channels,
        n_layer=len(reference.layers), n_head=reference.heads, n_inner=reference.inner, activation_function="gelu_new",
        layer_norm_epsilon=LAYER_NORM_EPSILON, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=True,
        use_cache=False, bos_token_id=0, eos_token_id=0)


def gpt_neo_config(reference):
    """Of a GPT-Neo."""
    return GPTNeoConfig(
        vocab_size=reference.vocabulary, max_position_embeddings=reference.positions,
        hidden_size=reference.channels, num_layers=len(reference.layers), num_heads=reference.heads,
        intermediate_size=reference.inner, window_size=reference.window, attention_types=attention_types(reference.layers),
        activation_function="gelu_new", layer_norm_epsilon=LAYER_NORM_EPSILON, resid_dropout=0.0, embed_dropout=0.0,
        attention_dropout=0.0, tie_word_embeddings=True, use_cache=False, bos_token_id=0, eos_token_id=0)


def make_model(reference, dtype=torch.float64, own_attention=True):
    """The model with the formula's weights; own_attention: False leaves GPT-Neo's cast to float32 in."""
    gpt2 = reference.window == 0
    config = gpt2_config(reference) if gpt2 else gpt_neo_config(reference)
    config._attn_implementation = "eager"
    model = (GPT2LMHeadModel if gpt2 else GPTNeoForCausalLM)(config).to(dtype)
    assert model.lm_head.weight is model.transformer.wte.weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(make_weights(name, tuple(parameter.shape), reference))
    if own_attention and not gpt2:
        for block in model.transformer.h:
            block.attn.attention.__class__ = DoubleAttention
    return model.train()


def cross_entropy(logits, targets):
    """Mean over the targets that count. Hugging Face's own loss shifts labels inside, ours are already shifted."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def plain_layer_norm(x, weight, bias):
    """LayerNorm over the last dimension, with the variance of the population."""
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + LAYER_NORM_EPSILON) * weight + bias


def plain_gelu(x):
    """gelu_new, the form with tanh."""
    return 0.5 * x * (1 + torch.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x * x * x)))


def plain_logits(p, tokens, reference):
    """Both written out from their specification; p(name) gives a parameter. Guards against changes in the library."""
    (_, T), H, gpt2 = tokens.shape, reference.heads, reference.window == 0

    def matrix(name):
        """(in, out), as GPT-2's Conv1D stores it."""
        return p(name) if gpt2 else p(name).T

    i, j = torch.arange(T)[:, None], torch.arange(T)[None, :]
    x = p("wte.weight")[tokens] + p("wpe.weight")[:T]  # (B, T, C)
    for layer, kind in enumerate(reference.layers):
        h = f"h.{layer}."
        attention = h + "attn." if gpt2 else h + "attn.attention."
        last = attention + ("c_proj" if gpt2 else "out_proj")
        y = plain_layer_norm(x, p(h + "ln_1.weight"), p(h + "ln_1.bias"))
        if gpt2:
            qkv = (y @ p(attention + "c_attn.weight") + p(attention + "c_attn.bias")).chunk(3, -1)
        else:
            qkv = [y @ p(f"{attention}{c}_proj.weight").T for c in "qkv"]
        q, k, v = (part.unflatten(-1, (H, -1)).transpose(1, 2) for part in qkv)
        keep = (j <= i) & (j > i - reference.window) if kind == "l" else j <= i
        scores = q @ k.transpose(-1, -2) / (q.size(-1) ** 0.5 if gpt2 else 1)  # (B, H, T, T), no 1/sqrt(D) in GPT-Neo
        heads = (torch.where(keep, scores, -torch.inf).softmax(-1) @ v).transpose(1, 2).flatten(2)
        x = x + heads @ matrix(last + ".weight") + p(last + ".bias")
        y = plain_layer_norm(x, p(h + "ln_2.weight"), p(h + "ln_2.bias"))
        y = plain_gelu(y @ matrix(h + "mlp.c_fc.weight") + p(h + "mlp.c_fc.bias"))
        x = x + y @ matrix(h + "mlp.c_proj.weight") + p(h + "mlp.c_proj.bias")
    return plain_layer_norm(x, p("ln_f.weight"), p("ln_f.bias")) @ p("wte.weight").T


def plain_values(reference):
    """Logits, loss and gradients of `plain_logits`, named as in the files."""
    model = make_model(reference)
    tokens, targets = make_batch(reference)
    named = dict(model.named_parameters())
    logits = plain_logits(lambda name: named["transformer." + name], tokens, reference)
    loss = cross_entropy(logits, targets)
    gradients = torch.autograd.grad(loss, list(named.values()))
    values = {f"grad.{name}": gradient for name, gradient in zip(named, gradients)}
    return values | {"logits": logits.detach(), "loss": loss.detach().reshape(1)}


def make_optimizer(model, reference):
    """AdamW; matrices and embeddings decay, biases and LayerNorm weights (the vectors) do not."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(BETA1, BETA2), eps=reference.epsilon, foreach=False, fused=False)


def train(model, optimizers, reference):
    """The losses of STEPS steps, each before its update."""
    tokens, targets = make_batch(reference)
    losses = []
    for _ in range(STEPS):
        model.zero_grad()
        loss = cross_entropy(model(input_ids=tokens, use_cache=False).logits, targets)
        loss.backward()
        losses.append(loss.detach().reshape(1))
        for optimizer in optimizers:
            optimizer.step()
    return torch.cat(losses)


def model_values(model, reference):
    """Everything the file holds except tokens and targets, in the model's dtype: one pass, then STEPS steps."""
    tokens, targets = make_batch(reference)
    optimizer = make_optimizer(model, reference)
    values, losses = {}, []
    for step in range(STEPS):
        optimizer.zero_grad()
        logits = model(input_ids=tokens, use_cache=False).logits
        loss = cross_entropy(logits, targets)
        loss.backward()
        losses.append(loss.detach().reshape(1))
        if step == 0:
            values = {f"grad.{name}": p.grad.clone() for name, p in model.named_parameters()}
            values |= {"logits": logits.detach().clone(), "loss": losses[0]}
        optimizer.step()
    values["losses"] = torch.cat(losses)
    return values | {f"after.{name}": p.detach().clone() for name, p in model.named_parameters()}


# ----------------------------------------------------------------------------------------
# comparing and storing


def disagreement(values, others):
    """{class: largest absolute difference} over the tensors that both have, by class: logits, loss, grad, ..."""
    worst = {}
    for name in values.keys() & others.keys():
        kind = name.split(".")[0]
        difference = (values[name].double() - others[name].double()).abs().max().item()
        worst[kind] = max(worst.get(kind, 0.0), difference)
    return worst


def describe(worst):
    """One line of a disagreement."""
    order = ("logits", "loss", "grad", "losses", "after")
    return "  ".join(f"{kind} {worst[kind]:.1e}" for kind in order if kind in worst)


def verify(values, reference):
    """Prints how three other ways of computing differ; fails where the library does not compute the specification."""
    plain = disagreement(values, plain_values(reference))
    cast = disagreement(values, model_values(make_model(reference, own_attention=False), reference))
    single = disagreement(values, model_values(make_model(reference, torch.float32, own_attention=False), reference))
    print(f"  the formulas written out, float64      {describe(plain)}")
    print(f"  transformers in float64, scores cast   {describe(cast)}")
    print(f"  transformers in float32                {describe(single)}")
    if not max(plain.values()) <= 1e-11:
        sys.exit(f"{reference.name}: transformers does not compute what the specification says")
    if not max(single.values()) <= 5e-5:
        sys.exit(f"{reference.name}: ill-conditioned, float32 is no longer close; choose another seed")


def stored(values, reference):
    """The values as the file holds them: float32, losses float64, tokens and targets int32."""
    tensors = {}
    for name, value in values.items():
        dtype = np.float64 if name in ("loss", "losses") else np.float32
        tensors[name] = np.ascontiguousarray(value.numpy().astype(dtype))
    tokens, targets = make_batch(reference)
    tensors["tokens"], tensors["targets"] = tokens.numpy().astype(np.int32), targets.numpy().astype(np.int32)
    return tensors


def metadata(reference):
    """Every number that a reader of the file needs; safetensors keeps strings only."""
    numbers = asdict(reference) | {
        "steps": STEPS, "learning_rate": LEARNING_RATE, "beta1": BETA1, "beta2": BETA2,
        "weight_decay": WEIGHT_DECAY, "layer_norm_epsilon": LAYER_NORM_EPSILON}
    return {key: str(value) for key, value in numbers.items()}


def same(tensor, other):
    """Whether two stored tensors agree: integers exactly, reals to a last bit that another machine may round otherwise."""
    if tensor.dtype != other.dtype or tensor.shape != other.shape:
        return False
    if tensor.dtype == np.int32:
        return np.array_equal(tensor, other)
    return bool(np.all(np.abs(tensor - other) <= 2e-7 * np.abs(tensor) + 1e-12))


def serialize(tensors, strings):
    """The file's bytes, with the metadata sorted: the library writes it in an order that changes from run to run."""
    content = save(tensors, metadata=strings)
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["__metadata__"] = dict(sorted(strings.items()))
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    assert len(text) == length
    return content[:8] + text + content[8 + length :]


def check(path, tensors, expected):
    """Names of what differs between a file and what was recomputed."""
    with safe_open(path, framework="numpy") as file:
        wrong = [] if file.metadata() == expected else ["metadata"]
        names = set(file.keys())
        wrong += sorted(names ^ tensors.keys())
        return wrong + sorted(name for name in names & tensors.keys() if not same(tensors[name], file.get_tensor(name)))


def main():
    """Writes or checks every file."""
    root = pathlib.Path(__file__).resolve().parents[2]
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=pathlib.Path, default=root / "test" / "reference", help="directory of the files")
    parser.add_argument("--check", action="store_true", help="compare with the files, write nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # one order of summation
    failures = 0
    for reference in REFERENCES:
        print(f"{reference.name}: {reference.why}")
        values = model_values(make_model(reference), reference)
        verify(values, reference)
        path, tensors = arguments.out / f"{reference.name}.safetensors", stored(values, reference)
        if arguments.check:
            wrong = check(path, tensors, metadata(reference))
            print("  differs: " + ", ".join(wrong) if wrong else "  the file agrees")
            failures += bool(wrong)
        else:
            arguments.out.mkdir(parents=True, exist_ok=True)
            path.write_bytes(serialize(tensors, metadata(reference)))
            print(f"  {path.stat().st_size} bytes, loss {values['losses'][0]:.6f} -> {values['losses'][-1]:.6f}")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()

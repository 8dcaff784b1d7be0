"""llm.c's model files: out and in again with the same bits, and as llm.c's own structs lay them out."""

import contextlib
import io
import json

import numpy as np

from tokenizer import llmc
from testing import DirectoryTest

L, C, V, T = 2, 6, 131, 9  # a vocabulary that is padded to 256


class LlmcTest(DirectoryTest):
    def setUp(self):
        super().setUp()
        (self.directory / "model").mkdir()
        self.write("model/config.json", json.dumps(
            {"model_type": "gpt2", "n_layer": L, "n_embd": C, "n_head": 3, "n_positions": T, "vocab_size": V}))
        random = np.random.default_rng(5)
        shapes = {"wte.weight": (V, C), "wpe.weight": (T, C), "ln_f.weight": (C,), "ln_f.bias": (C,)}
        for layer in range(L):  # as Hugging Face has them: (in, out)
            shapes |= {f"h.{layer}.{name}": shape for name, shape in {
                "ln_1.weight": (C,), "ln_1.bias": (C,), "attn.c_attn.weight": (C, 3 * C), "attn.c_attn.bias": (3 * C,),
                "attn.c_proj.weight": (C, C), "attn.c_proj.bias": (C,), "ln_2.weight": (C,), "ln_2.bias": (C,),
                "mlp.c_fc.weight": (C, 4 * C), "mlp.c_fc.bias": (4 * C,), "mlp.c_proj.weight": (4 * C, C),
                "mlp.c_proj.bias": (C,)}.items()}
        self.tensors = {name: random.normal(size=shape).astype("<f4") for name, shape in shapes.items()}
        llmc.write_safetensors(self.directory / "model/model.safetensors", "F32", {
            "transformer." + name: array for name, array in self.tensors.items()})

    def convert(self, *arguments) -> tuple[int, str]:
        """Exit code and errors; the first two arguments are names in the directory."""
        errors = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
            code = llmc.main([str(self.directory / name) for name in arguments[:2]] + list(arguments[2:]))
        return code, errors.getvalue()

    def packed(self) -> np.ndarray:
        """What llm.c's ParameterTensors hold, one behind the other."""
        t, both = self.tensors, range(L)
        wte = np.zeros((256, C), "<f4")
        wte[:V] = t["wte.weight"]
        parts = [wte, t["wpe.weight"]]
        for name in ("ln_1.weight", "ln_1.bias"):
            parts += [t[f"h.{i}.{name}"] for i in both]
        for block, following in (("attn.c_attn", ()), ("attn.c_proj", ("ln_2.weight", "ln_2.bias")), ("mlp.c_fc", ()),
                                 ("mlp.c_proj", ())):
            parts += [t[f"h.{i}.{block}.weight"].T for i in both] + [t[f"h.{i}.{block}.bias"] for i in both]
            parts += [t[f"h.{i}.{name}"] for name in following for i in both]
        return np.concatenate([part.ravel() for part in parts + [t["ln_f.weight"], t["ln_f.bias"]]])

    def test_both_versions_go_out_and_in(self):
        self.assertEqual(self.convert("model", "model.bin"), (0, ""))
        data = (self.directory / "model.bin").read_bytes()
        self.assertEqual(np.frombuffer(data, "<i4", 8).tolist(), [20240326, 3, T, V, L, 3, C, 256])
        self.assertEqual(data[1024:], self.packed().tobytes())
        self.assertEqual(self.convert("model.bin", "again"), (0, ""))
        for name, array in llmc.read_safetensors(self.directory / "again/model.safetensors").items():
            np.testing.assert_array_equal(array, self.tensors[name])
        config = json.loads((self.directory / "again/config.json").read_text())
        self.assertEqual((config["n_head"], config["vocab_size"], config["n_positions"]), (3, V, T))

        self.assertEqual(self.convert("model", "half.bin", "--bf16"), (0, ""))
        halves = np.frombuffer((self.directory / "half.bin").read_bytes()[1024:], "<u2")
        values = (halves.astype("<u4") << 16).view("<f4")
        self.assertTrue(np.all(np.abs(values - self.packed()) <= np.abs(self.packed()) / 256))
        self.assertEqual(self.convert("half.bin", "half"), (0, ""))
        self.assertEqual(self.convert("half", "twice.bin", "--bf16"), (0, ""))
        self.assertEqual((self.directory / "twice.bin").read_bytes(), (self.directory / "half.bin").read_bytes())

    def test_what_is_wrong_is_named(self):
        self.assertEqual(self.convert("model", "model.bin")[0], 0)
        data = (self.directory / "model.bin").read_bytes()
        self.assertRegex(self.convert("model", "model.bin")[1], "exists")
        self.write("cut.bin", data[:-4])
        self.assertRegex(self.convert("cut.bin", "x")[1], "size that its header says")
        self.write("old.bin", data[:4] + b"\1\0\0\0" + data[8:])
        self.assertRegex(self.convert("old.bin", "x")[1], "version 3 or 5")
        self.write("empty.bin", "")
        self.assertRegex(self.convert("empty.bin", "x")[1], "no model file of llm.c")
        path = self.directory / "model/config.json"
        config = json.loads(path.read_text())
        for key, value in (("layer_norm_epsilon", 1e-3), ("scale_attn_weights", False), ("activation_function", "gelu"),
                           ("scale_attn_by_inverse_layer_idx", True)):
            path.write_text(json.dumps(config | {key: value}))
            self.assertRegex(self.convert("model", "z.bin")[1], f"{key} is {value}, and .* in every model of llm.c")
        path.write_text("{}")
        self.assertEqual(self.convert("model", "y.bin")[0], 2)

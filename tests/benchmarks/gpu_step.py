"""The training step of one GPU: images a second by setting and batch size, and what the time goes into.

    python -m tests.benchmarks.gpu_step [--unet sd2-base] [--resolution 512] [--batch 64 96 128] [--minutes 8]
    python -m tests.benchmarks.gpu_step --unet tiny --resolution 64 --batch 16 --steps 3      # on a CPU, to try it

Random latents, weights drawn on the GPU, a full step with the optimizer, EMA off, bf16. The settings that should be
fastest come first, at the first batch size (halved until it fits), then the fastest at the other sizes, then what tells
how much each part of it is worth. Each result is written when it is there. A setting that fails (out of memory, a
backend that is not there) says so and is passed over; after --minutes, shared evenly by the resolutions, no new one is
begun. "of roofline" is the share of the least time by tests/benchmarks/roofline.py, elementwise operations for nothing.
"""

import contextlib
import dataclasses
import functools
import gc
import os
import tempfile
import time
from unittest import mock

# Its key does not say which attention was chosen: a graph compiled with one would be taken for another.
os.environ["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"

import pandas as pd  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from diffusers import UNet2DConditionModel  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from helpers import unet as unet_module  # noqa: E402
from helpers.config import TrainingConfig  # noqa: E402
from helpers.lesson import ablations, published_results  # noqa: E402
from tests.benchmarks import record, roofline  # noqa: E402

BACKENDS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclasses.dataclass(frozen=True)
class Setting:
    """`changes` of the config; `mode` of `torch.compile`; the `attention` to take first; `prepare(train_step)`."""

    changes: dict = dataclasses.field(default_factory=dict)
    mode: str | None = None
    attention: SDPBackend | None = None
    cudnn_benchmark: bool = True
    prepare: object = None


class MasterWeights:
    """An optimizer for bf16 weights that updates an fp32 copy of them; in place of a `TrainStep`'s AdamW."""

    def __init__(self, train_step):
        self.weights = list(train_step.unet.parameters())
        self.masters = [weight.detach().float() for weight in self.weights]
        options = {name: value for name, value in train_step.optimizer.defaults.items() if name in ("lr", "betas")}
        self.optimizer = torch.optim.AdamW(self.masters, fused=True, **options)
        self.state = self.optimizer.state
        self.param_groups = [{**self.optimizer.param_groups[0], "params": self.weights}]
        for master in self.masters:
            master.grad = torch.empty_like(master)

    @torch.no_grad()
    def step(self):
        torch._foreach_copy_([master.grad for master in self.masters], [weight.grad for weight in self.weights])
        self.optimizer.param_groups[0]["lr"] = self.param_groups[0]["lr"]
        self.optimizer.grad_scale, self.optimizer.found_inf = self.grad_scale, self.found_inf
        self.optimizer.step()
        torch._foreach_copy_(self.weights, self.masters)

    def zero_grad(self, set_to_none=True):
        for weight in self.weights:
            weight.grad = None


def plain_bf16(train_step):
    """Weights, activations and gradients in bf16, with neither FSDP2 nor autocast; AdamW on an fp32 copy."""
    train_step.optimizer, train_step.autocast_precision = MasterWeights(train_step), "fp32"
    roofline.cast(train_step.unet, torch.bfloat16)  # the same parameters, so the optimizer's list stays true

    def lower(value):
        return value.bfloat16() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    def cast_inputs(_, arguments, named):
        return tuple(map(lower, arguments)), {name: lower(value) for name, value in named.items()}

    train_step.unet.register_forward_pre_hook(cast_inputs, with_kwargs=True)


def plain_bf16_in_graphs(train_step):
    """`plain_bf16`, whose compiled blocks are replayed as CUDA graphs: each step begins anew in their memory."""
    plain_bf16(train_step)
    step = train_step.step

    def begin_and_step(*arguments):
        torch.compiler.cudagraph_mark_step_begin()
        return step(*arguments)

    train_step.step = begin_and_step


FSDP = {"strategy": "fsdp", "compile_unet": True, "channels_last": True}
PLAIN = {**FSDP, "strategy": "ddp"}
# "fsdp" on one GPU computes in bf16 as such, norms included, beside fp32 weights; "ddp" by autocast.
SETTINGS = {
    "fsdp, channels last, compiled": Setting(FSDP),
    "bf16 weights + fp32 copy, channels last, compiled": Setting(PLAIN, prepare=plain_bf16),
    "fsdp, cuDNN attention": Setting(FSDP, attention=SDPBackend.CUDNN_ATTENTION),
    "fsdp, flash attention": Setting(FSDP, attention=SDPBackend.FLASH_ATTENTION),
}
# How much a part is worth, and what compiles for minutes: after the other batch sizes.
CONTROLS = {
    "bf16 weights + fp32 copy, CUDA graphs": Setting(PLAIN, "reduce-overhead", prepare=plain_bf16_in_graphs),
    "fsdp, not channels last": Setting({**FSDP, "channels_last": False}),
    "fsdp, without cudnn.benchmark": Setting(FSDP, cudnn_benchmark=False),
    "fsdp, not compiled": Setting({**FSDP, "compile_unet": False}),
    "autocast, channels last, compiled": Setting(PLAIN),
    "fsdp, max-autotune": Setting(FSDP, "max-autotune-no-cudagraphs"),
}


def compile_by(compile_blocks, mode, unet):
    """`compile_blocks`; where `torch.compile` has no `isolate_recompiles` (PyTorch 2.11), with a higher limit."""
    try:
        return compile_blocks(unet, mode)
    except TypeError:
        torch._dynamo.config.recompile_limit = 64
        for block in [*unet.down_blocks, unet.mid_block, *unet.up_blocks]:
            block.compile(mode=mode, dynamic=False)
        return unet


@contextlib.contextmanager
def switched(setting, device):
    """The process as a setting wants it; weights are drawn on the device, where that takes no time."""

    def build_on_device(name, *, seed=0, **_):
        torch.manual_seed(seed)
        with torch.device(device):
            return UNet2DConditionModel.from_config(unet_module.load_unet_config(name))

    # On a CPU, which only tries the code, compiling would take minutes.
    compile_blocks = (
        functools.partial(compile_by, unet_module.compile_blocks, setting.mode)
        if device == "cuda"
        else lambda unet: unet
    )
    order = sorted(BACKENDS, key=lambda backend: backend != setting.attention)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(unet_module, "build_unet", build_on_device))
        stack.enter_context(mock.patch.object(unet_module, "compile_blocks", compile_blocks))
        stack.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
        torch.backends.cudnn.benchmark = setting.cudnn_benchmark
        if setting.attention:
            stack.enter_context(sdpa_kernel(order, set_priority=True))
        yield


@contextlib.contextmanager
def one_rank(device):
    """A process group of this process alone."""
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, init_method=f"file://{folder}/meet", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


class Sweep:
    """The settings at one resolution; `rows` are what was measured, `keep(rows)` is called after each."""

    def __init__(self, given, resolution, device, rates, until, keep):
        self.given, self.resolution, self.device, self.rates = given, resolution, device, rates
        self.until, self.keep, self.rows, self.kinds = until, keep, [], {}

    def measure(self, name, batch):
        """Measure a setting; False if it failed for want of memory."""
        if time.monotonic() > self.until:
            print(f"  no time left for: {name}, batch {batch}", flush=True)
            return True
        setting, device, micro_batch = {**SETTINGS, **CONTROLS}[name], self.device, self.given.micro_batch
        config = TrainingConfig(
            unet_config=self.given.unet,
            resolution=self.resolution,
            global_batch_size=batch,
            precision="bf16",
            micro_batch_size=micro_batch if micro_batch and batch % micro_batch == 0 else None,
            **setting.changes,
        )
        began, out_of_memory = time.monotonic(), False
        try:
            with switched(setting, device):
                found = ablations.measure_step(
                    config, device, steps=self.given.steps, warm_up=min(4, self.given.steps), prepare=setting.prepare
                )
        except Exception as error:  # whatever a compiler or a backend does not like; said, and the next one is tried
            out_of_memory = isinstance(error, torch.OutOfMemoryError)
            found = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        if isinstance(found, str):  # outside of `except`, which would keep the failed step's memory alive
            torch.compiler.reset()
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
            print(f"  failed: {name}, batch {batch}: {found}", flush=True)
            return not out_of_memory
        least = roofline.least_seconds(roofline.step_work(self.given.unet, self.resolution, batch), self.rates).sum()
        row = {"setting": name, "batch": batch, **found, "of roofline": found["images/s"] * least / batch}
        self.kinds[name, batch] = row.pop("kinds")
        self.rows.append({**row, "seconds to measure": time.monotonic() - began})
        print(f"  {name}, batch {batch}: {row['images/s']:.1f} images/s, MFU {row['MFU']:.1%}, ", end="")
        print(f"{row['of roofline']:.1%} of the roofline, {row['peak memory, GiB']:.0f} GiB", flush=True)
        self.keep(self.rows)
        return True

    @property
    def best(self):
        return max(self.rows, key=lambda row: row["images/s"])

    def run(self):
        first, *others = self.given.batch
        for name in SETTINGS:
            while not self.measure(name, first) and first > 1:
                first //= 2
        if not self.rows:
            return
        for batch in others:
            if batch != first:
                self.measure(self.best["setting"], batch)
        for name in CONTROLS:
            self.measure(name, first)


def main():
    given = record.options(
        __doc__, unet="sd2-base", resolution=[512], batch=[64, 96, 128], micro_batch=0, steps=10, minutes=8.0
    )
    started = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hardware = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    rates = roofline.ceilings(device)
    if device == "cuda":
        torch.cuda.empty_cache()
    print(f"{hardware}, torch {torch.__version__}, {given.unet}, bf16, random latents, EMA off")
    print("ceilings: " + ", ".join(f"{kind} {rate / 1e12:.3g} T/s" for kind, rate in rates.items()), flush=True)
    summary, details = {}, {}
    with one_rank(device):
        for number, resolution in enumerate(given.resolution, start=1):
            print(f"{resolution} pixels:", flush=True)

            def keep(rows, resolution=resolution):
                best = max(rows, key=lambda row: row["images/s"])
                details[resolution] = rows
                summary[f"one step of {given.unet} at {resolution} pixels, the fastest setting"] = (
                    f"{best['images/s']:.1f} images/s, MFU {best['MFU']:.1%}, {best['of roofline']:.1%} of the "
                    f"roofline ({best['setting']}, batch {best['batch']})"
                )
                record.write("gpu_step", summary, settings=details, ceilings=rates)

            until = started + 60 * given.minutes * number / len(given.resolution)
            sweep = Sweep(given, resolution, device, rates, until, keep)
            sweep.run()
            if sweep.rows:
                print(pd.DataFrame(sweep.rows).sort_values("images/s", ascending=False).round(3).to_string(index=False))
                print(f"where the time of the fastest goes ({sweep.best['setting']}, batch {sweep.best['batch']}):")
                kinds = pd.DataFrame(sweep.kinds[sweep.best["setting"], sweep.best["batch"]])
                print(kinds.round(3).to_string(index=False), flush=True)
                record.write("gpu_step", summary, settings=details, ceilings=rates, kinds=kinds.to_dict("records"))
    for row in published_results.ABLATION.itertuples():
        if row.setup == "+ torch.compile":
            each = row.images_per_second / int(row.gpus.split()[0])
            print(f"published: {each:.0f} images/s a GPU at {row.resolution} px ({row.gpus}; {row.source})")
    fact = published_results.FACTS["one H200, MLPerf at 512 px"]
    print(f"published: {fact.value} images/s a GPU at 512 px (H200; {fact.source}, MLPerf Training v4.0)")


if __name__ == "__main__":
    main()

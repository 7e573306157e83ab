"""Noise that is a function of the sample, not of how many numbers were drawn before.

A random bit is a hash of an address (counter-based random numbers: Salmon et al., 2011): of the seed, the epoch, the
place of the sample in the epoch's order, the layer, its call and the element. So a sample loses the same elements on
any number of devices, in any micro-batch, beside any padding, and after any resume.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from datamodules.loading.randomness import derive_seed_at, random_bits, signed

__all__ = [
    "StatelessLayer",
    "begin_noise",
    "dropout_factors",
    "end_noise",
    "noise_keys",
    "number_layers",
    "repeat_noise",
    "sample_keys",
    "sample_noise",
]


# The odd multipliers of MurmurHash3's 32-bit and 64-bit finalisers (Appleby, 2008).
_MIX_1, _MIX_2 = signed(0x85EBCA6B, 32), signed(0xC2B2AE35, 32)
_MIX_64 = signed(0xFF51AFD7ED558CCD)
_LOW_16 = (1 << 16) - 1


def _mix_bits(x: Tensor) -> Tensor:
    """The high bits of int32 into the low ones, in place. Torch shifts arithmetically, hence the mask."""
    return x.bitwise_xor_((x >> 16) & _LOW_16)


def sample_keys(seed: int, epoch: int, positions: Tensor) -> Tensor:
    """A key of 64 random bits for each sample, int64 of shape (n,).

    Args:
        positions: places of the samples in the order of the epoch, or their numbers; int64 of shape (n,).
    """
    return random_bits(seed, "dropout", epoch, positions).squeeze(1)


def dropout_factors(
    keys: Tensor,
    elements: int | Tensor,
    p: float,
    layer: int = 0,
    call: int = 0,
    part: int = 0,
    rows: Tensor | None = None,
    time: int = 1,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """What dropout multiplies with: 0 with probability `p`, else ``1 / (1 - p)``; of shape (n, elements).

    An element's factor is a function of the key of its sample, `layer`, `call`, `part` and the element's number alone,
    to the bit on every device, and it does not wait for the device. About 1.5 nanoseconds an element on a CPU.

    Args:
        keys: of the samples, from `sample_keys`, int64 of shape (n,).
        elements: how many a row has, or the numbers of some of them, int32 of shape (elements,).
        layer: number of the layer in its network.
        call: how often the layer was called before with these samples.
        part: which of several masks of one call.
        rows: rows of a flattened (n, time, elements), int64 of shape (rows,); the result has those rows only.
        time: rows of a sample, where `rows` is given; `elements` is a number then.

    Example:
        >>> keys = sample_keys(seed=1, epoch=0, positions=torch.arange(8))
        >>> whole = dropout_factors(keys, 6, p=0.5)
        >>> bool((dropout_factors(keys[5:], 4, p=0.5) == whole[5:, :4]).all())
        True
    """
    mixed = (keys ^ derive_seed_at(0, layer, call, part)) * _MIX_64
    high = mixed >> 32
    shift, multiplier = (mixed ^ high).to(torch.int32).unsqueeze(1), (high | 1).to(torch.int32).unsqueeze(1)
    numbers = elements
    if not isinstance(numbers, Tensor):
        numbers = torch.arange(numbers * time, dtype=torch.int32, device=keys.device)
    # Inductor computes multiples of an arange with overflows that are undefined in C++, unless bits change first.
    numbers = _mix_bits((numbers ^ _MIX_2).mul_(_MIX_1)).mul_(_MIX_2)
    if rows is not None:
        samples = rows // time
        shift, multiplier = shift[samples], multiplier[samples]
        numbers = numbers.view(time, -1)[rows - samples * time]
    # A random affine map for each sample (Dietzfelbinger et al., 1997), and a round that breaks its linearity.
    bits = _mix_bits((numbers ^ shift).mul_(multiplier)).mul_(_MIX_1)
    threshold = min(int(p * 2**32), 2**32 - 1) - 2**31
    return bits.ge_(threshold).to(dtype).mul_(1.0 / (1.0 - p) if p < 1 else 0.0)


class _Noise:
    """The samples of one micro-batch, and how often each layer was called with them."""

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys
        self.calls: dict[int, int] = {}
        self.open = True


# A global of the process, not of the thread: autograd recomputes checkpointed layers in threads of its own.
_noise: _Noise | None = None


def begin_noise(keys: Tensor) -> None:
    """From now on layers draw the noise of these samples, until `end_noise`; `sample_noise` does both."""
    global _noise
    _noise = _Noise(keys)


def end_noise() -> None:
    """From now on layers act as torch's."""
    if _noise is not None:
        _noise.open = False


def noise_keys() -> Tensor | None:
    """The keys of the samples whose noise is drawn now, int64 of shape (n,); None where torch draws it."""
    return _noise.keys if _noise is not None and _noise.open else None


def repeat_noise() -> None:
    """The next forward pass over the same samples draws the same noise again, as for an optimizer's closure."""
    if _noise is not None:
        _noise.calls.clear()


@contextmanager
def sample_noise(seed: int, epoch: int, positions: Tensor) -> Iterator[None]:
    """Within it, the layers of `stateless_dropout` draw their noise by sample; dimension 0 of their input is the batch.

    The backward pass belongs into it where activations are checkpointed, since layers are called again there.

    Args:
        positions: places of the batch's samples in the order of the epoch, or their numbers; int64 of shape (batch,),
            on the device of the network.

    Example:
        >>> from callbacks import stateless_dropout
        >>> layer = stateless_dropout(nn.Dropout(0.5))
        >>> with sample_noise(seed=1, epoch=0, positions=torch.arange(8)):
        ...     whole = layer(torch.ones(8, 6))
        >>> with sample_noise(seed=1, epoch=0, positions=torch.arange(4, 8)):
        ...     half = layer(torch.ones(4, 6))
        >>> bool((whole[4:] == half).all())
        True
    """
    global _noise
    before = _noise
    begin_noise(sample_keys(seed, epoch, positions))
    try:
        yield
    finally:
        end_noise()
        if before is not None and before.open:
            _noise = before


def _is_recomputed() -> bool:
    """Whether a backward pass is running, in which a layer is called by activation checkpointing."""
    # The test that torch.utils.checkpoint makes; there is no public one. A compiled graph recomputes by itself.
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class StatelessLayer(nn.Module):
    """What layers need to draw their noise by sample. Layers of torch become this by a change of their class."""

    number: int | None = None
    """Of the layer in its network; None until `number_layers` has seen it."""
    name: str = ""
    _falls_back: bool = False

    def _address(self, input: Tensor, samples: int | None) -> tuple[Tensor, int, int] | None:
        """The keys of the samples, the layer's number and the number of this call; None where torch draws the noise.

        Args:
            samples: how many the input holds by its shape; None where it does not tell.
        """
        noise = _noise
        if noise is None:
            return None
        recomputed = _is_recomputed()
        if not noise.open:
            if recomputed and self.number in noise.calls:
                raise RuntimeError(
                    f"{self._title()} is called again by activation checkpointing after the noise of its samples has "
                    "ended: call backward() within sample_noise(...)"
                )
            return None
        if self.number is None:
            self._fall_back("it was not in the network when its layers were numbered; call stateless_dropout(network)")
            return None
        if samples not in (None, len(noise.keys)):
            self._fall_back(
                f"its input of shape {tuple(input.shape)} does not hold the batch of {len(noise.keys)} samples where "
                "it is expected; set the layer's `batch_dim`, or pass `rows`"
            )
            return None
        call = noise.calls.get(self.number, 0)
        if not recomputed:
            noise.calls[self.number] = call + 1
        elif call == 1:
            call = 0
        else:
            raise RuntimeError(
                f"{self._title()} is called {call} times in a forward pass and again by activation checkpointing, so "
                "that its noise cannot be repeated: checkpoint another part, or use a layer for each call"
            )
        return noise.keys.to(input.device), self.number, call

    def _title(self) -> str:
        return f"layer {self.name!r} ({type(self).__name__})" if self.name else type(self).__name__

    def _fall_back(self, reason: str) -> None:
        if not self._falls_back:
            self._falls_back = True
            rank_zero_warn(f"the noise of {self._title()} depends on the rank and the micro-batch: {reason}")


def _plain_name(name: str) -> str:
    """The name of a layer without the wrappers of torch.compile and DDP."""
    return ".".join(part for part in name.split(".") if part not in ("_orig_mod", "module"))


def number_layers(module: nn.Module) -> int:
    """Number the layers here within a module in their order, which is part of the address of their noise.

    Returns:
        How many there are.
    """
    layers = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, StatelessLayer)]
    for number, (name, layer) in enumerate(layers):
        layer.number, layer.name = number, _plain_name(name)
    return len(layers)

"""Run the smallest program that has everything: two splitting ops, three pieces, two sizes to capture.

Only the environment decides what happens: ``PIECEWORK_LEVEL=0`` (the default) runs it eagerly, ``PIECEWORK_LEVEL=3``
piece by piece. The result is the same.
"""

import torch
from torch import nn

import piecework_silly_attention  # noqa: F401  (registers silly::attention)
from piecework import counters, set_attention_ops, set_compile_context, support_torch_compile

set_attention_ops(["silly.attention"])


@support_torch_compile
class SillyModel(nn.Module):
    """Add three, take three away; after each, the op adds one to the first row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return ``[rows]``."""
        x = x + 1
        x = x + 2
        out = torch.empty_like(x)
        torch.ops.silly.attention(x, x, x, out)  # out = q, then out[0] += 1
        x = out
        x = x - 2
        x = x - 1
        out = torch.empty_like(x)
        torch.ops.silly.attention(x, x, x, out)
        x = out
        x = x + 1
        return x


def main() -> None:
    """Print the result for two rows of zeros, ``[3, 1]``, and what was counted on the way to it."""
    model = SillyModel()
    with torch.no_grad():
        with set_compile_context([1, 2]):
            for num_rows in (100, 2, 1):
                model(torch.randn(num_rows))
        result = model(torch.zeros(2))
    print("result:", result)
    for name, count in counters.snapshot().items():
        print(f"{name}: {count}")


if __name__ == "__main__":
    main()

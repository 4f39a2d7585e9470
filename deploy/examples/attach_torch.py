"""A plain torch loop that publishes every ten steps. Start `reef-bus up --set training.backend=attached` first, then

    python deploy/examples/attach_torch.py reef-state

Killed and started again, it goes on from its own checkpoint; a step that it publishes twice is one release.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from reef_bus.attach import attach_blocking
from reef_bus.config import load
from reef_bus.policy import PolicyConfig, new_policy
from reef_bus.tokens import BOS, SEP

STEPS, EVERY = 60, 10


def sequences(step: int) -> torch.Tensor:
    """`[bos, d, sep, d, d, …]`: the right answer to a digit is that digit, again and again."""
    digits = torch.randint(0, 10, (64, 1), generator=torch.Generator().manual_seed(step))
    return torch.cat([torch.full_like(digits, BOS), digits, torch.full_like(digits, SEP), digits.expand(-1, 16)], 1)


def main(state: Path) -> None:
    policy, step, checkpoint = new_policy(PolicyConfig(), seed=0), 0, state / "attach_torch.pt"
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
    if checkpoint.exists():
        step, weights, moments = torch.load(checkpoint)
        policy.load_state_dict(weights)
        optimizer.load_state_dict(moments)
    with attach_blocking(load(state / "run" / "deployment.json")) as bus:
        while True:
            if step % EVERY == 0:  # the checkpoint comes first, so that what is published can be gone on from
                torch.save((step, policy.state_dict(), optimizer.state_dict()), checkpoint.with_suffix(".new"))
                checkpoint.with_suffix(".new").replace(checkpoint)
                print(bus.publish(dict(policy.named_parameters()), step=step), flush=True)
            if step == STEPS:
                break
            ids = sequences(step)
            loss = F.cross_entropy(policy(ids[:, :-1])[:, 2:].flatten(0, 1), ids[:, 3:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1


if __name__ == "__main__":
    main(Path(sys.argv[1]))

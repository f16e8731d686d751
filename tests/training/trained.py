"""Composed models whose parameters follow from the run: fresh ones, and some that have learnt something."""

from __future__ import annotations

from typing import TypeVar

from spheroid_node.model.composed import ComposedModel
from spheroid_node.model.initial import initial_vector
from spheroid_node.model.parameters import flatten, group_module, unflatten_
from spheroid_node.run import INTERFACE_GROUP, RunSpec, block_group
from spheroid_node.training.local import LocalTrainer
from spheroid_node.training.text import Text

Model = TypeVar("Model", bound=ComposedModel)


def fresh(model: Model) -> Model:
    """``model`` at version 0; a new one has whatever PyTorch's own generator gave."""
    for group in model.run.groups:
        unflatten_(group_module(model, group), initial_vector(model.run, group))
    return model


def trained(run: RunSpec, text: Text, steps: int = 15) -> ComposedModel:
    """Blocks trained one after the other, each on the blocks and the interface before it."""
    model = ComposedModel(run)
    for block in range(run.model.blocks):
        trainer = LocalTrainer(run, block, text)
        if block:
            held = [INTERFACE_GROUP, *(block_group(hop.index) for hop in trainer.upstream)]
            for group in held:
                trainer.load(group, 1, steps, flatten(group_module(model, group)))
        trainer.train(steps)
        unflatten_(group_module(model, block_group(block)), flatten(trainer.hop.block))
        unflatten_(model.interface, flatten(trainer.hop.interface))
    return model

"""hf_domino: assisted generation with Domino drafters. Importing it is all that generate() needs."""

from transformers import AutoConfig, AutoModel

from .acceptance import Acceptance, track_acceptance
from .assisted_generation import connect, disconnect
from .configuration_domino import DominoConfig
from .generation_domino import DominoCandidateGenerator
from .modeling_domino import DominoDrafter

AutoConfig.register(DominoConfig.model_type, DominoConfig, exist_ok=True)
AutoModel.register(DominoConfig, DominoDrafter, exist_ok=True)
connect()

__all__ = [
    "Acceptance",
    "DominoCandidateGenerator",
    "DominoConfig",
    "DominoDrafter",
    "connect",
    "disconnect",
    "track_acceptance",
]

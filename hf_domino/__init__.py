"""hf_domino: Domino, DFlash and EAGLE-3 drafters for assisted generation. Importing it is all it needs."""

from transformers import AutoConfig, AutoModel

from .acceptance import Acceptance, track_acceptance
from .assisted_generation import connect, disconnect
from .configuration_domino import DominoConfig
from .configuration_eagle3 import Eagle3Config
from .generation_domino import DominoCandidateGenerator
from .generation_eagle3 import Eagle3CandidateGenerator
from .modeling_domino import DominoDrafter
from .modeling_eagle3 import Eagle3Drafter

for _drafter in (DominoDrafter, Eagle3Drafter):
    AutoConfig.register(_drafter.config_class.model_type, _drafter.config_class, exist_ok=True)
    AutoModel.register(_drafter.config_class, _drafter, exist_ok=True)
connect()

__all__ = [
    "Acceptance",
    "DominoCandidateGenerator",
    "DominoConfig",
    "DominoDrafter",
    "Eagle3CandidateGenerator",
    "Eagle3Config",
    "Eagle3Drafter",
    "connect",
    "disconnect",
    "track_acceptance",
]

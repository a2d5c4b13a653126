"""Example models, which name their dims and do not refer to meshes."""

from nnx_parallel.models.classifier import MLPClassifier as MLPClassifier
from nnx_parallel.models.classifier import MLPClassifierConfig as MLPClassifierConfig
from nnx_parallel.models.classifier import classification_loss as classification_loss
from nnx_parallel.models.families.deepseek import Latents as Latents
from nnx_parallel.models.families.granite import Multipliers as Multipliers
from nnx_parallel.models.families.qwen3_next import DeltaNet as DeltaNet
from nnx_parallel.models.gemma3n import Gemma3n as Gemma3n
from nnx_parallel.models.gemma3n_config import Gemma3nConfig as Gemma3nConfig
from nnx_parallel.models.generation import generate as generate
from nnx_parallel.models.generation import pad_prompts as pad_prompts
from nnx_parallel.models.gpt import GPT as GPT
from nnx_parallel.models.gpt import next_token_loss as next_token_loss
from nnx_parallel.models.gpt_config import GPTConfig as GPTConfig
from nnx_parallel.models.gpt_config import config_from_hf as config_from_hf
from nnx_parallel.models.gpt_config import config_to_hf as config_to_hf
from nnx_parallel.models.resnet import ResNet as ResNet
from nnx_parallel.models.resnet import ResNetConfig as ResNetConfig
from nnx_parallel.models.rotary import LongRopeScaling as LongRopeScaling
from nnx_parallel.models.rotary import RopeScaling as RopeScaling
from nnx_parallel.models.rotary import YarnScaling as YarnScaling
from nnx_parallel.models.vit import ViT as ViT
from nnx_parallel.models.vit import ViTConfig as ViTConfig

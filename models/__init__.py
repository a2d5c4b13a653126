"""Example models: they name their dims and know nothing of meshes."""

from models.classifier import MLPClassifier as MLPClassifier
from models.classifier import MLPClassifierConfig as MLPClassifierConfig
from models.classifier import classification_loss as classification_loss
from models.generation import generate as generate
from models.gpt import GPT as GPT
from models.gpt import next_token_loss as next_token_loss
from models.gpt_config import GPTConfig as GPTConfig
from models.resnet import ResNet as ResNet
from models.resnet import ResNetConfig as ResNetConfig
from models.vit import ViT as ViT
from models.vit import ViTConfig as ViTConfig

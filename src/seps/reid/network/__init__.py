"""The network of re-identification: backbone, global vectors, gate, texts, and what is made of them."""

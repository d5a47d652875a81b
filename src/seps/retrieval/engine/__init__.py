"""What encodes and scores pictures and sentences, and how one picture is kept."""

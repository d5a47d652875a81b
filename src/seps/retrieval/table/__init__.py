"""What a store does with its Lance table: vectors packed and found, indexes made, and upkeep after changes."""

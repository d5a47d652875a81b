"""From a folder of pictures to a store."""

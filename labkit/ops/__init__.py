"""Where scripts written for DeepSpeed look for its layers."""

"""The denoiser f_theta(x_t, t): its architecture, its weights and their averages, and the files that hold them."""

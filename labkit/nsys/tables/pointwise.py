"""Names of PyTorch's pointwise operators, which compute each element of a result from one element of each input."""

TAGGED = (  # with the tag `torch.Tag.pointwise`, without "aten::" and the last "_" (PyTorch 2.13)
    "_conj_physical abs acos acosh add addcdiv addcmul angle asin asinh atan atan2 atanh bitwise_and "
    "bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min "
    "clip conj_physical copysign cos cosh deg2rad digamma div elu eq erf erfc erfinv exp exp2 expm1 float_power "
    "floor fmax fmin fmod frac frexp gcd ge gelu gelu_backward gt hardshrink hardsigmoid hardtanh heaviside hypot "
    "i0 igamma igammac isfinite isinf isnan isneginf isposinf lcm ldexp le leaky_relu lerp lgamma log log10 log1p "
    "log2 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit logit_backward lt maximum "
    "minimum mish mul mvlgamma nan_to_num native_dropout_backward ne neg nextafter polygamma pow rad2deg reciprocal "
    "relu relu6 remainder round rrelu rsqrt rsub selu sgn sigmoid sigmoid_backward sign signbit silu silu_backward "
    "sin sinc sinh softplus softshrink special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 "
    "special_bessel_y1 special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v "
    "special_chebyshev_polynomial_w special_entr special_erfcx special_hermite_polynomial_h "
    "special_hermite_polynomial_he special_i0e special_i1 special_i1e special_laguerre_polynomial_l "
    "special_legendre_polynomial_p special_log_ndtr special_modified_bessel_i0 special_modified_bessel_i1 "
    "special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri special_scaled_modified_bessel_k0 "
    "special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t "
    "special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v "
    "special_shifted_chebyshev_polynomial_w special_spherical_bessel_j0 special_xlog1py special_zeta sqrt square "
    "sub tan tanh tanh_backward threshold threshold_backward true_divide trunc where xlogy __ilshift__ __lshift__ "
    "__rshift__ __ixor__ __xor__"
)
SAME = {  # untagged operator: the tagged operator that it calls
    "absolute": "abs", "arccos": "acos", "arccosh": "acosh", "arcsin": "asin", "arcsinh": "asinh", "arctan": "atan",
    "arctan2": "atan2", "arctanh": "atanh", "divide": "div", "fix": "trunc", "greater": "gt", "greater_equal": "ge",
    "less": "lt", "less_equal": "le", "multiply": "mul", "negative": "neg", "not_equal": "ne", "subtract": "sub",
    "special_digamma": "digamma", "special_erf": "erf", "special_erfc": "erfc", "special_erfinv": "erfinv",
    "special_exp2": "exp2", "special_expit": "sigmoid", "special_expm1": "expm1", "special_gammainc": "igamma",
    "special_gammaincc": "igammac", "special_gammaln": "lgamma", "special_i0": "i0", "special_log1p": "log1p",
    "special_logit": "logit", "special_multigammaln": "mvlgamma", "special_polygamma": "polygamma",
    "special_psi": "digamma", "special_round": "round", "special_sinc": "sinc", "special_xlogy": "xlogy",
}  # fmt: skip
# Pointwise although they have no tag: bits, activations, dropout, and their derivatives.
UNTAGGED = (
    "__irshift__ __iand__ __and__ __ior__ __or__ "
    "dropout native_dropout _fused_dropout prelu _prelu_kernel _prelu_kernel_backward hardswish hardswish_backward "
    "hardsigmoid_backward hardtanh_backward hardshrink_backward softshrink_backward softplus_backward elu_backward "
    "leaky_relu_backward mish_backward log_sigmoid log_sigmoid_forward log_sigmoid_backward floor_divide"
)
EACH = "_foreach_"  # beginning of an operator that does the same to each tensor of a list
POINTWISE = frozenset((*TAGGED.split(), *SAME, *UNTAGGED.split()))


def is_pointwise(name: str) -> bool:
    """Whether an operator is pointwise; `name` is without "aten::" and without the last "_" of an operator in place."""
    return name.removeprefix(EACH) in POINTWISE

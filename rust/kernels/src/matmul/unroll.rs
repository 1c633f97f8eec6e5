//! Loops that are unrolled in the source.

/// Loop over `0..N`, for a constant parameter `N` of at most sixteen, or over a list of numbers, that is unrolled in the
/// source. The sums of a tile are an array, which gets into registers only if every index is a constant early on; the
/// optimizer's own unrolling may come too late for that.
macro_rules! unroll {
    ($i:ident in [$($number:literal)*] $body:block) => {
        $({
            let $i = $number;
            $body
        })*
    };
    ($i:ident in 0..$n:ident $body:block) => { $crate::matmul::unroll::unroll!($i $n $body 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15) };
    ($i:ident $n:ident $body:block $($number:literal)*) => {
        $(if $crate::matmul::unroll::Below::<$number, $n>::TRUE {
            let $i = $number;
            $body
        })*
    };
}

/// Comparison of two constants. The compiler evaluates it once for each pair of numbers, where it would evaluate a `const`
/// block in a generic function once for each place and each instance: that took half of its time before code generation.
pub(crate) struct Below<const I: usize, const N: usize>;

impl<const I: usize, const N: usize> Below<I, N> {
    /// Whether `I < N`.
    pub const TRUE: bool = I < N;
}

pub(crate) use unroll;

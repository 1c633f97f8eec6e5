//! Loops that are written out.

/// A loop over `0..N`, at most to sixteen, or over a list of numbers, that is written out. The sums of a tile are an
/// array, which gets into registers only if every index is a constant early on; the optimizer's own unrolling may come
/// too late for that.
macro_rules! unroll {
    ($i:ident in [$($number:literal)*] $body:block) => {
        $({
            let $i = $number;
            $body
        })*
    };
    ($i:ident in 0..$n:ident $body:block) => { $crate::matmul::unroll::unroll!($i $n $body 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15) };
    ($i:ident $n:ident $body:block $($number:literal)*) => {
        $(if const { $number < $n } {
            let $i = $number;
            $body
        })*
    };
}

pub(crate) use unroll;

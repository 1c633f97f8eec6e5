//! The ceilings of the machine, for standing beside a kernel's figures: measured with the same threads and instructions.
//!
//! A ceiling is only worth something from the same minute as the figure, since machines are shared and clocks move.
//! So one pass of each probe is short, and a benchmark calls them in turn with what it measures.

use std::hint::black_box;
use std::time::Instant;

use crate::arch::{Kernel, LANES, Simd};
use crate::memory::{AllocError, PageSlice};
use crate::{Exec, PoolError};

/// One cache line.
type Line = [f32; LANES];

/// Streams that a thread reads side by side: one alone reaches half of what the memory gives.
const STREAMS: usize = 8;

/// Lines of a stream: a task reads 8 MiB.
const STREAM_LINES: usize = 16384;

/// Memory to read through, again and again.
pub struct ReadProbe {
    lines: PageSlice<Line>,
}

impl ReadProbe {
    /// Takes `bytes` of memory, rounded up to whole MiB. Take several times the last cache.
    ///
    /// # Errors
    /// [`AllocError`] if there is not that much.
    pub fn new(bytes: usize) -> Result<Self, AllocError> {
        let lines = bytes.div_ceil(size_of::<Line>()).next_multiple_of(STREAMS * STREAM_LINES);
        let mut lines = PageSlice::<Line>::zeroed(lines)?;
        // Pages that were never written all show the same page of zeros, which never leaves the cache.
        lines.iter_mut().for_each(|line| line[0] = 1.0);
        Ok(Self { lines })
    }

    /// Reads it all once; bytes per second.
    ///
    /// # Errors
    /// [`PoolError`] if `exec` was cancelled.
    pub fn pass(&self, exec: &Exec<'_>) -> Result<f64, PoolError> {
        let start = Instant::now();
        let tasks = self.lines.len() / (STREAMS * STREAM_LINES);
        exec.run(tasks, |task| {
            let lines = &self.lines[task * STREAMS * STREAM_LINES..][..STREAMS * STREAM_LINES];
            black_box(exec.isa.run(Read(lines)));
        })?;
        Ok(size_of_val(&*self.lines) as f64 / start.elapsed().as_secs_f64())
    }
}

struct Read<'a>(&'a [Line]);

impl Kernel for Read<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> f32 {
        /// 1 KiB ahead.
        const AHEAD: usize = 16;
        let streams: [&[Line]; STREAMS] = std::array::from_fn(|i| &self.0[i * STREAM_LINES..][..STREAM_LINES]);
        let mut sums = [simd.splat(0.0); STREAMS];
        for i in 0..STREAM_LINES {
            for (sum, stream) in sums.iter_mut().zip(streams) {
                *sum = simd.max(simd.load(&stream[i]), *sum);
                simd.prefetch(stream.as_ptr().wrapping_add(i + AHEAD).cast());
            }
        }
        simd.reduce_max(sums.into_iter().fold(simd.splat(0.0), |a, b| simd.max(a, b)))
    }
}

/// f32 operations per second in multiply-adds that wait for nothing; a multiply-add is two.
///
/// # Errors
/// [`PoolError`] if `exec` was cancelled.
pub fn f32_pass(exec: &Exec<'_>) -> Result<f64, PoolError> {
    const STEPS: usize = 200_000;
    let start = Instant::now();
    let tasks = exec.pool.threads() * 4;
    let chains = std::sync::atomic::AtomicUsize::new(0);
    exec.run(tasks, |_| {
        let done = exec.isa.run(MultiplyAdds(STEPS));
        chains.fetch_add(done, std::sync::atomic::Ordering::Relaxed);
    })?;
    Ok((chains.into_inner() * STEPS * LANES * 2) as f64 / start.elapsed().as_secs_f64())
}

struct MultiplyAdds(usize);

impl Kernel for MultiplyAdds {
    /// Chains that went on side by side.
    type Output = usize;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> usize {
        // As many as the registers hold with room for the factors.
        match S::TILE_ROWS * S::TILE_PANELS {
            16.. => self.chains::<S, 16>(simd),
            6.. => self.chains::<S, 6>(simd),
            _ => self.chains::<S, 2>(simd),
        }
    }
}

impl MultiplyAdds {
    #[inline(always)]
    fn chains<S: Simd, const N: usize>(self, simd: S) -> usize {
        let (factor, term) = (simd.splat(black_box(0.5)), simd.splat(black_box(1.0)));
        let mut sums = [simd.splat(0.0); N];
        for _ in 0..self.0 {
            for sum in &mut sums {
                *sum = simd.mul_add(*sum, factor, term);
            }
        }
        for sum in sums {
            black_box(simd.reduce_add(sum));
        }
        N
    }
}

/// Integer additions per second that wait for nothing. This falls when a neighbour shares the core, where the read
/// bandwidth may not.
///
/// # Errors
/// [`PoolError`] if `exec` was cancelled.
pub fn add_pass(exec: &Exec<'_>) -> Result<f64, PoolError> {
    const STEPS: u64 = 500_000;
    const ADDS: u64 = 32;
    let start = Instant::now();
    let tasks = exec.pool.threads() * 4;
    exec.run(tasks, |_| adds(STEPS))?;
    Ok((tasks as u64 * STEPS * ADDS) as f64 / start.elapsed().as_secs_f64())
}

/// `steps` times 32 additions in eight chains. Assembly, because a compiler knows what such a loop comes to.
#[cfg(target_arch = "x86_64")]
fn adds(steps: u64) {
    // SAFETY: adds to registers that it declares.
    unsafe {
        std::arch::asm!(
            "2:",
            ".rept 4",
            "add {a}, 1", "add {b}, 1", "add {c}, 1", "add {d}, 1", "add {e}, 1", "add {f}, 1", "add {g}, 1", "add {h}, 1",
            ".endr",
            "dec {steps}",
            "jnz 2b",
            steps = inout(reg) steps.max(1) => _,
            a = out(reg) _, b = out(reg) _, c = out(reg) _, d = out(reg) _,
            e = out(reg) _, f = out(reg) _, g = out(reg) _, h = out(reg) _,
            options(nomem, nostack),
        );
    }
}

/// `steps` times 32 additions in eight chains.
#[cfg(not(target_arch = "x86_64"))]
fn adds(steps: u64) {
    let mut chains = [0u64; 8];
    for _ in 0..steps * 4 {
        for chain in &mut chains {
            *chain = black_box(*chain).wrapping_add(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use super::*;
    use crate::arch::Isa;
    use crate::{Cancel, Pool};

    #[test]
    fn probes_measure_something() {
        let (pool, cancel) = (Pool::new(NonZeroUsize::new(2).unwrap()), Cancel::new());
        let read = ReadProbe::new(5 << 20).unwrap();
        for isa in Isa::available() {
            let exec = Exec { isa, pool: &pool, cancel: &cancel };
            for figure in [read.pass(&exec), f32_pass(&exec), add_pass(&exec)] {
                let figure = figure.unwrap();
                assert!(figure.is_finite() && figure > 1e6, "{figure}");
            }
        }
    }
}

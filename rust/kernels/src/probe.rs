//! The ceilings of the machine, for standing beside a kernel's figures: measured with the same threads and
//! instructions.
//!
//! A ceiling is only worth something from the same minute as the figure, since machines are shared and clocks move.
//! So one pass of each probe is short, and a benchmark calls them in turn with what it measures.

use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use crate::arch::{ByteLine, Isa, Kernel, LANES, LINE, Simd};
use crate::memory::{AllocError, PageSlice};
use crate::{Exec, PoolError};

/// One cache line.
type Line = [f32; LANES];

/// How many streams a thread may read side by side. What is fastest differs: processors that look far ahead by
/// themselves like one, others need several to keep enough reads under way.
pub const STREAMS: [usize; 3] = [1, 4, 8];

/// Lines that a task reads: 8 MiB.
const TASK_LINES: usize = 1 << 17;

/// Memory to read through, again and again.
pub struct ReadProbe {
    lines: PageSlice<Line>,
}

impl ReadProbe {
    /// Takes `bytes` of memory, rounded up to whole tasks of 8 MiB. Take at least twice the last cache: a quarter of
    /// what is read still comes from a cache of half its size.
    ///
    /// # Errors
    /// [`AllocError`] if there is not that much.
    pub fn new(bytes: usize) -> Result<Self, AllocError> {
        let lines = bytes.div_ceil(size_of::<Line>()).next_multiple_of(TASK_LINES);
        // Small pages cost a tenth of the bandwidth.
        let mut lines = PageSlice::<Line>::zeroed_in_huge_pages(lines)?;
        // Pages that were never written all show the same page of zeros, which never leaves the cache.
        lines.iter_mut().for_each(|line| line[0] = 1.0);
        Ok(Self { lines })
    }

    /// Bytes of memory that a pass reads.
    #[must_use]
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.lines)
    }

    /// Which of [`STREAMS`] is fastest here, by the medians of a few passes in turn.
    ///
    /// # Errors
    /// [`PoolError`] if `exec` was cancelled.
    pub fn fastest_streams(&self, exec: &Exec<'_>) -> Result<usize, PoolError> {
        const ROUNDS: usize = 5;
        let mut passes = [[0.0; ROUNDS]; STREAMS.len()];
        for round in 0..ROUNDS {
            for (passes, streams) in passes.iter_mut().zip(STREAMS) {
                passes[round] = self.pass(exec, streams)?;
            }
        }
        let medians = passes.map(|mut passes| {
            passes.sort_by(f64::total_cmp);
            passes[ROUNDS / 2]
        });
        let fastest = (0..STREAMS.len()).max_by(|a, b| medians[*a].total_cmp(&medians[*b]));
        Ok(STREAMS[fastest.unwrap_or(0)])
    }

    /// Reads it all once, `streams` (one of [`STREAMS`]) side by side in each thread; bytes per second.
    ///
    /// # Errors
    /// [`PoolError`] if `exec` was cancelled.
    pub fn pass(&self, exec: &Exec<'_>, streams: usize) -> Result<f64, PoolError> {
        let start = Instant::now();
        exec.run(self.lines.len() / TASK_LINES, |task| {
            let lines = &self.lines[task * TASK_LINES..][..TASK_LINES];
            black_box(exec.isa.run(Read { lines, streams }));
        })?;
        Ok(self.bytes() as f64 / start.elapsed().as_secs_f64())
    }
}

struct Read<'a> {
    lines: &'a [Line],
    streams: usize,
}

impl Kernel for Read<'_> {
    type Output = f32;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> f32 {
        // The nearer to each other the streams, the farther each must look ahead.
        match self.streams {
            1 => self.streams::<S, 1, 8, 64>(simd),
            4 => self.streams::<S, 4, 2, 32>(simd),
            _ => self.streams::<S, 8, 1, 16>(simd),
        }
    }
}

impl Read<'_> {
    /// Reads `STREAMS` streams, `STEP` lines of one before the next, and prefetches lines `AHEAD` of them.
    #[inline(always)]
    fn streams<S: Simd, const STREAMS: usize, const STEP: usize, const AHEAD: usize>(&self, simd: S) -> f32 {
        /// As many as the latency of an addition needs, and no more than the registers hold.
        const SUMS: usize = 4;
        let length = self.lines.len() / STREAMS;
        let streams: [&[Line]; STREAMS] = std::array::from_fn(|i| &self.lines[i * length..][..length]);
        let mut sums = [simd.splat(0.0); SUMS];
        for i in (0..length).step_by(STEP) {
            for (number, stream) in streams.into_iter().enumerate() {
                for (offset, line) in stream[i..][..STEP].iter().enumerate() {
                    let sum = &mut sums[(number + offset) % SUMS];
                    *sum = simd.max(simd.load(line), *sum);
                    simd.prefetch(stream.as_ptr().wrapping_add(i + offset + AHEAD).cast());
                }
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
    operations(exec, LANES * 2 * STEPS, |isa| isa.run(MultiplyAdds(STEPS)))
}

/// int8 operations per second in dot products that wait for nothing; a multiply-add is two.
///
/// # Errors
/// [`PoolError`] if `exec` was cancelled.
pub fn int8_pass(exec: &Exec<'_>) -> Result<f64, PoolError> {
    const STEPS: usize = 200_000;
    operations(exec, LINE * 2 * STEPS, |isa| isa.run(Dots(STEPS)))
}

/// Operations per second of `chains`, which says how many chains of `each` operations it went through.
fn operations(exec: &Exec<'_>, each: usize, chains: impl Fn(Isa) -> usize + Sync) -> Result<f64, PoolError> {
    let start = Instant::now();
    let done = AtomicUsize::new(0);
    exec.run(exec.pool.threads() * 4, |_| {
        done.fetch_add(chains(exec.isa), Ordering::Relaxed);
    })?;
    Ok((done.into_inner() * each) as f64 / start.elapsed().as_secs_f64())
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

struct Dots(usize);

impl Kernel for Dots {
    /// Chains that went on side by side.
    type Output = usize;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> usize {
        // As in `MultiplyAdds`. Biased weights tell of one instruction; without, a product needs registers of its own,
        // and only the short addition at its end waits for the one before.
        match S::TILE_ROWS * S::TILE_PANELS {
            16.. => self.chains::<S, 16>(simd),
            6.. if S::WEIGHT_BIAS != 0 => self.chains::<S, 6>(simd),
            6.. => self.chains::<S, 3>(simd),
            _ => self.chains::<S, 2>(simd),
        }
    }
}

impl Dots {
    /// In each step one line of weights meets `N` rows. All products differ from one another and from those of the
    /// step before: where a dot product is several instructions, none of them can be done once for many.
    #[inline(always)]
    fn chains<S: Simd, const N: usize>(self, simd: S) -> usize {
        const LINES: usize = 64;
        let weights = black_box([ByteLine([3; LINE]); LINES]);
        let rows = black_box([ByteLine([1; LINE]); N]);
        let mut sums = [simd.splat_i32(0); N];
        for step in 0..self.0 {
            let w = simd.load_bytes(&weights[step % LINES].0);
            for (sum, row) in sums.iter_mut().zip(&rows) {
                *sum = simd.dot(*sum, w, simd.load_bytes(&row.0));
            }
        }
        for sum in sums {
            let mut lanes = [0; LANES];
            simd.store_i32(sum, &mut lanes);
            black_box(lanes);
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
            let reads = STREAMS.map(|streams| read.pass(&exec, streams));
            for figure in [int8_pass(&exec), f32_pass(&exec), add_pass(&exec)].into_iter().chain(reads) {
                let figure = figure.unwrap();
                assert!(figure.is_finite() && figure > 1e6, "{figure}");
            }
            assert!(STREAMS.contains(&read.fastest_streams(&exec).unwrap()));
        }
    }
}

//! Roofline probes: memory bandwidth and peak arithmetic throughput of the machine, measured with the same threads and
//! instructions as the kernels.
//!
//! Machines are shared and clock rates change, so a probe must run at the same time as the measurement that it is
//! compared with. One pass of each probe is therefore short, and benchmarks interleave passes with measurements.

use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use crate::arch::{ByteLine, Dot, DotKernel, Isa, Kernel, LANES, LINE, MatrixKernel, MatrixUnit, RowTile, Simd, Tiles};
use crate::memory::{AllocError, PageSlice};
use crate::{Exec, PoolError};

/// Cache line of f32.
type Line = [f32; LANES];

/// Numbers of streams that a thread can read concurrently. The fastest one depends on the processor: with aggressive
/// hardware prefetching it is one; others need several streams to keep enough loads in flight.
pub const STREAMS: [usize; 3] = [1, 4, 8];

/// Number of lines that a task reads: 8 MiB.
const TASK_LINES: usize = 1 << 17;

/// Read bandwidth probe with its memory.
pub struct ReadProbe {
    lines: PageSlice<Line>,
}

impl ReadProbe {
    /// Allocates `bytes` of memory, rounded up to a multiple of 8 MiB. Use at least twice the size of the last-level
    /// cache; even then a quarter of the reads hit that cache.
    ///
    /// # Errors
    /// [`AllocError`] if allocation fails.
    pub fn new(bytes: usize) -> Result<Self, AllocError> {
        let lines = bytes.div_ceil(size_of::<Line>()).next_multiple_of(TASK_LINES);
        // Small pages would cost a tenth of the bandwidth.
        let mut lines = PageSlice::<Line>::zeroed_in_huge_pages(lines)?;
        // Pages that were never written all map to one zero page, which stays in the cache.
        lines.iter_mut().for_each(|line| line[0] = 1.0);
        Ok(Self { lines })
    }

    /// Returns the bytes that a pass reads.
    #[must_use]
    pub fn bytes(&self) -> usize {
        size_of_val(&*self.lines)
    }

    /// Returns the fastest of [`STREAMS`] on this machine, by the medians of a few interleaved passes.
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

    /// Reads the memory once with `streams` (one of [`STREAMS`]) streams per thread and returns the bandwidth in bytes per
    /// second.
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
        // Fewer streams need a longer prefetch distance.
        match self.streams {
            1 => self.streams::<S, 1, 8, 64>(simd),
            4 => self.streams::<S, 4, 2, 32>(simd),
            _ => self.streams::<S, 8, 1, 16>(simd),
        }
    }
}

impl Read<'_> {
    /// Reads `STREAMS` streams, alternating between them every `STEP` lines and prefetching `AHEAD` lines ahead.
    #[inline(always)]
    fn streams<S: Simd, const STREAMS: usize, const STEP: usize, const AHEAD: usize>(&self, simd: S) -> f32 {
        /// Number of accumulators: enough to hide the latency of an operation, few enough for the registers.
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

/// Measures the peak f32 throughput in operations per second; a multiply-add counts as two.
///
/// # Errors
/// [`PoolError`] if `exec` was cancelled.
pub fn f32_pass(exec: &Exec<'_>) -> Result<f64, PoolError> {
    const STEPS: usize = 200_000;
    operations(exec, LANES * 2 * STEPS, |isa| isa.run(MultiplyAdds(STEPS)))
}

/// Measures the peak int8 dot product throughput in operations per second, that of the matrix unit if there is one; a
/// multiply-add counts as two.
///
/// # Errors
/// [`PoolError`] if `exec` was cancelled.
pub fn int8_pass(exec: &Exec<'_>) -> Result<f64, PoolError> {
    const STEPS: usize = 200_000;
    operations(exec, LINE * 2 * STEPS, |isa| match isa.run_matrix(TileProducts(STEPS / 8)) {
        Some(lines) => lines / STEPS,
        None => isa.run_dot(Dots(STEPS)),
    })
}

/// Measures the operations per second of `chains`, which returns its number of chains of `each` operations.
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
    /// Number of concurrent chains.
    type Output = usize;

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) -> usize {
        // As many chains as fit the registers beside the factors.
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

impl DotKernel for Dots {
    /// Number of concurrent chains.
    type Output = usize;

    #[inline(always)]
    fn run<S: Dot>(self, simd: S) -> usize {
        // As in `MultiplyAdds`. A weight bias means that a dot product is one instruction. Otherwise a product needs
        // additional registers, and only its final addition depends on the previous product.
        match S::TILE_ROWS * S::TILE_PANELS {
            16.. => self.chains::<S, 16>(simd),
            6.. if S::WEIGHT_BIAS != 0 => self.chains::<S, 6>(simd),
            6.. => self.chains::<S, 3>(simd),
            _ => self.chains::<S, 2>(simd),
        }
    }
}

impl Dots {
    /// Multiplies one line of weights with `N` rows in each iteration. All products differ, within and between
    /// iterations, so that the compiler cannot share instructions of a multi-instruction dot product.
    #[inline(always)]
    fn chains<S: Dot, const N: usize>(self, simd: S) -> usize {
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

/// Kernel that multiplies some times two tiles of rows with those of two panels.
struct TileProducts(usize);

impl MatrixKernel for TileProducts {
    /// Number of products of lines.
    type Output = usize;

    fn run<S: Dot, M: MatrixUnit>(self, _: S, unit: M) -> usize {
        let x: [RowTile; 2] = black_box([[[1; LINE]; LANES]; 2]);
        let w = black_box([[ByteLine([3; LINE]); LANES]; 2]);
        let mut sums = [[[[0; LANES]; LANES]; 2]; 2];
        // SAFETY: these are the only tiles of this thread: kernels with a unit do not run each other.
        let mut tiles = unsafe { unit.configure() };
        tiles.clear::<0>();
        tiles.clear::<1>();
        for _ in 0..self.0 {
            tiles.load(w.each_ref());
            tiles.add::<0>(&x[0]);
            tiles.add::<1>(&x[1]);
        }
        tiles.store::<0>(&mut sums[0]);
        tiles.store::<1>(&mut sums[1]);
        black_box(sums);
        self.0 * x.len() * w.len() * LANES * LANES
    }
}

/// Measures the peak integer addition throughput in operations per second. It drops when another program uses the same
/// core, which the read bandwidth may not show.
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

/// Executes `steps` times 32 additions in eight chains. It is assembly because a compiler would optimize the loop away.
#[cfg(target_arch = "x86_64")]
fn adds(steps: u64) {
    // SAFETY: modifies only registers that are declared as outputs.
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

/// Executes `steps` times 32 additions in eight chains.
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
    fn probes_return_plausible_throughput() {
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

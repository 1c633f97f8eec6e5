//! Number of streams of memory that a thread should read.

use std::sync::LazyLock;

/// Returns whether a thread reads weights that come from memory faster as one stream than as several side by side: on
/// processors of AMD (Zen 5: `benches/record/2026-11-29-amd-epyc-zen5/matmul-one-stream.txt`). Those of Intel need several
/// to keep enough reads in flight.
#[must_use]
pub fn reads_one_stream() -> bool {
    /// CPUID takes microseconds in virtual machines.
    static IS_FASTER: LazyLock<bool> = LazyLock::new(|| vendor().is_some_and(|vendor| VENDORS.contains(&&vendor)));
    *IS_FASTER
}

/// Vendors of processors of the Zen architecture, as CPUID names them.
const VENDORS: [&[u8; 12]; 2] = [b"AuthenticAMD", b"HygonGenuine"];

/// Returns the vendor of the processor, if it is known.
#[cfg(target_arch = "x86_64")]
#[allow(unused_unsafe, reason = "CPUID is unsafe in the oldest supported compiler")]
fn vendor() -> Option<[u8; 12]> {
    // SAFETY: all processors of x86-64 have CPUID.
    let leaf = unsafe { std::arch::x86_64::__cpuid(0) };
    let parts = [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes);
    parts.as_flattened().first_chunk().copied()
}

#[cfg(not(target_arch = "x86_64"))]
fn vendor() -> Option<[u8; 12]> {
    None
}

//! AMX (Sapphire Rapids, 2023, and later): the registers of AVX-512 with VNNI, and a matrix unit.
//!
//! Linux lets a process use the unit only after it asked for it, because the registers take 8 KiB more of each thread's
//! state. Whether it may is found out once; all threads of the process share the permission.

#[cfg(debug_assertions)]
mod model;
mod steps;

#[cfg(debug_assertions)]
pub use model::Model;
#[cfg(all(target_arch = "x86_64", feature = "amx"))]
pub use unit::Amx;

#[cfg(all(target_arch = "x86_64", feature = "amx"))]
mod unit {
    use std::arch::asm;
    use std::arch::x86_64::{__cpuid, __cpuid_count, _xgetbv};
    use std::marker::PhantomData;
    use std::sync::LazyLock;

    use super::steps::{PALETTE, TILES, TileConfig, step_text};
    use crate::arch::matrix::{MatrixUnit, RowTile, TileSums, Tiles, WithUnit};
    use crate::arch::{Avx512Vnni, ByteLine, LANES, LINE};

    /// AVX-512 with VNNI and AMX for bytes.
    pub type Amx = WithUnit<Avx512Vnni, AmxInt8>;

    impl Amx {
        /// Returns a token if this machine has the instructions and the system lets this process use them.
        #[must_use]
        pub fn detect() -> Option<Self> {
            static IS_AVAILABLE: LazyLock<bool> = LazyLock::new(|| has_unit() && request_permission());
            let simd = Avx512Vnni::detect()?;
            IS_AVAILABLE.then(|| Self::new(simd, AmxInt8(())))
        }
    }

    /// Bits of the register states in XCR0: the configuration of the tiles, and their data.
    const STATES: u64 = 1 << 17 | 1 << DATA_STATE;

    /// Number of the state of the tiles' data.
    const DATA_STATE: u32 = 18;

    /// Returns whether this machine has eight tiles of sixteen rows of 64 bytes and products of their bytes, and the system
    /// saves the registers. The machine must have AVX-512.
    #[allow(unused_unsafe, reason = "CPUID is unsafe in the oldest supported compiler")]
    fn has_unit() -> bool {
        const TILE: u32 = 1 << 24;
        const INT8: u32 = 1 << 25;
        /// Leaf of the sizes of tiles.
        const TILES_LEAF: u32 = 0x1d;
        // SAFETY: a machine with AVX-512 has CPUID, and XGETBV if the system saves its registers.
        unsafe {
            if __cpuid(0).eax < TILES_LEAF || __cpuid_count(7, 0).edx & (TILE | INT8) != TILE | INT8 {
                return false;
            }
            let sizes = __cpuid_count(TILES_LEAF, PALETTE.into());
            let (row_bytes, tiles, rows) = (sizes.ebx & 0xffff, sizes.ebx >> 16, sizes.ecx & 0xffff);
            let fits = row_bytes >= LINE as u32 && tiles >= TILES as u32 && rows >= LANES as u32;
            fits && _xgetbv(0) & STATES == STATES
        }
    }

    /// Asks the system for the use of the tiles' data, and returns whether it may be used.
    #[cfg(target_os = "linux")]
    fn request_permission() -> bool {
        /// Code of `arch_prctl` that asks for a state (Linux, `arch/x86/include/uapi/asm/prctl.h`).
        const ARCH_REQ_XCOMP_PERM: libc::c_int = 0x1023;
        // SAFETY: the call takes two numbers and changes only which registers this process may use.
        unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, libc::c_ulong::from(DATA_STATE)) == 0 }
    }

    /// Other systems are not known to allow it.
    #[cfg(not(target_os = "linux"))]
    fn request_permission() -> bool {
        false
    }

    /// Proof that this machine has AMX for bytes and that this process may use it.
    #[derive(Clone, Copy, Debug)]
    pub struct AmxInt8(());

    /// Configured tiles of this thread.
    pub struct AmxTiles {
        /// The configuration belongs to the thread.
        not_send: PhantomData<*mut ()>,
    }

    impl MatrixUnit for AmxInt8 {
        const WEIGHT_BIAS: u8 = 128;

        type Tiles = AmxTiles;

        #[inline(always)]
        unsafe fn configure(self) -> AmxTiles {
            let config: &TileConfig = const { &TileConfig::new() };
            // SAFETY: `self` exists only where detection found the instruction and got the permission; it reads the
            // configuration, which is valid.
            unsafe { asm!("ldtilecfg [{}]", in(reg) config, options(nostack, preserves_flags, readonly)) };
            AmxTiles { not_send: PhantomData }
        }
    }

    impl Drop for AmxTiles {
        #[inline(always)]
        fn drop(&mut self) {
            // SAFETY: the machine has the instruction, because these tiles were configured. It changes no other register.
            unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) };
        }
    }

    /// Runs a step. Rust does not promise that registers keep their contents between blocks of assembly. Tiles do: compilers
    /// use them for AMX intrinsics alone, and kernels have none.
    macro_rules! run_step {
        ($text:expr, $($operand:tt)*) => { asm!($text, $($operand)*, options(nostack, preserves_flags)) };
    }

    impl Tiles for AmxTiles {
        #[inline(always)]
        fn clear<const ROW: usize>(&mut self) {
            // SAFETY: these tiles are configured in this thread.
            unsafe {
                match const { ROW } {
                    0 => run_step!(step_text!(clear 0), out("tmm0") _, out("tmm1") _),
                    1 => run_step!(step_text!(clear 1), out("tmm2") _, out("tmm3") _),
                    _ => const { assert!(ROW < 2, "there are the sums of two tiles") },
                }
            }
        }

        #[inline(always)]
        fn load(&mut self, w: [&[ByteLine; LANES]; 2]) {
            // SAFETY: these tiles are configured in this thread. The step reads sixteen lines of each panel.
            unsafe {
                run_step!(step_text!(load), w0 = in(reg) w[0], w1 = in(reg) w[1], stride = in(reg) LINE,
                    out("tmm6") _, out("tmm7") _);
            }
        }

        #[inline(always)]
        fn add<const ROW: usize>(&mut self, x: &RowTile) {
            // SAFETY: these tiles are configured in this thread. The step reads a tile.
            unsafe {
                match const { ROW } {
                    0 => run_step!(step_text!(add 0), x = in(reg) x, stride = in(reg) LINE,
                        out("tmm0") _, out("tmm1") _, out("tmm4") _),
                    1 => run_step!(step_text!(add 1), x = in(reg) x, stride = in(reg) LINE,
                        out("tmm2") _, out("tmm3") _, out("tmm5") _),
                    _ => const { assert!(ROW < 2, "there are the sums of two tiles") },
                }
            }
        }

        #[inline(always)]
        fn store<const ROW: usize>(&self, sums: &mut [TileSums; 2]) {
            // SAFETY: these tiles are configured in this thread. The step writes two tiles of sums, with rows of 64 bytes
            // that follow each other.
            unsafe {
                match const { ROW } {
                    0 => run_step!(step_text!(store 0), sums = in(reg) sums, stride = in(reg) LINE),
                    1 => run_step!(step_text!(store 1), sums = in(reg) sums, stride = in(reg) LINE),
                    _ => const { assert!(ROW < 2, "there are the sums of two tiles") },
                }
            }
        }
    }
}

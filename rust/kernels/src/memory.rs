//! Memory for weights, caches and what lies between two operations: aligned to cache lines, touched only when used.

use std::fmt;
use std::marker::PhantomData;
use std::num::NonZeroUsize;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use bytemuck::Pod;

/// The system refused memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the system refused {bytes} bytes of memory")]
pub struct AllocError {
    /// How much was asked for; `u64::MAX` where the size does not fit 64 bits.
    pub bytes: u64,
}

/// A slice that starts on a page boundary. Its pages are zero and take no room until they are written.
pub struct PageSlice<T> {
    start: NonNull<T>,
    len: usize,
    owner: PhantomData<T>,
}

// SAFETY: a `PageSlice` owns its elements as a `Vec` does.
unsafe impl<T: Send> Send for PageSlice<T> {}
// SAFETY: a shared `PageSlice` gives shared references only.
unsafe impl<T: Sync> Sync for PageSlice<T> {}

impl<T: Pod> PageSlice<T> {
    fn empty() -> Self {
        // Aligned like everything else, so that a view of it as another type is as good as any.
        const NOWHERE: NonZeroUsize = NonZeroUsize::new(4096).unwrap();
        Self { start: NonNull::without_provenance(NOWHERE), len: 0, owner: PhantomData }
    }

    /// `len` elements whose bytes are all zero.
    ///
    /// # Errors
    /// [`AllocError`] if the system has not that much memory to give, or limits forbid it.
    pub fn zeroed(len: usize) -> Result<Self, AllocError> {
        const { assert!(align_of::<T>() <= 4096, "a page is aligned to 4096 bytes") };
        let Some(bytes) = len.checked_mul(size_of::<T>()).filter(|bytes| isize::try_from(*bytes).is_ok()) else {
            return Err(AllocError { bytes: u64::MAX });
        };
        if bytes == 0 {
            return Ok(Self { len, ..Self::empty() });
        }
        // SAFETY: asks for new anonymous memory at an address of the kernel's choice; nothing existing is touched.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        match NonNull::new(start.cast::<T>()) {
            Some(start) if start.as_ptr().cast() != libc::MAP_FAILED => Ok(Self { start, len, owner: PhantomData }),
            _ => Err(AllocError { bytes: bytes as u64 }),
        }
    }
}

impl<T> PageSlice<T> {
    /// Asks for pages of 2 MiB, which are then also taken from the system 2 MiB at a time. Where the system has none
    /// to give, everything stays as it is.
    pub fn prefer_huge_pages(&self) {
        #[cfg(target_os = "linux")]
        if self.len > 0 {
            // SAFETY: advice about the mapping of `zeroed`; what it holds does not change.
            unsafe { libc::madvise(self.start.as_ptr().cast(), self.len * size_of::<T>(), libc::MADV_HUGEPAGE) };
        }
    }
}

/// Room for what one operation leaves to the next, kept from call to call.
#[derive(Debug)]
pub struct Scratch<T>(PageSlice<T>);

impl<T: Pod> Default for Scratch<T> {
    fn default() -> Self {
        Self(PageSlice::empty())
    }
}

impl<T: Pod> Scratch<T> {
    /// `len` elements that hold anything: write before you read.
    ///
    /// # Panics
    /// If the system refuses the memory.
    pub fn take(&mut self, len: usize) -> &mut [T] {
        /// Less is not worth a huge page.
        const HUGE_BYTES: usize = 2 << 20;
        if self.0.len < len {
            *self = Self::default();
            self.0 = PageSlice::zeroed(len.next_power_of_two()).unwrap_or_else(|error| panic!("{error}"));
            // Rows of a tile are far apart: with small pages of the system each would be a walk through its tables.
            if size_of_val(&*self.0) >= HUGE_BYTES {
                self.0.prefer_huge_pages();
            }
        }
        &mut self.0[..len]
    }
}

impl<T> Deref for PageSlice<T> {
    type Target = [T];

    #[inline]
    fn deref(&self) -> &[T] {
        // SAFETY: `zeroed` mapped room for `len` elements, all zero, which is a value of every Pod type.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T> DerefMut for PageSlice<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`; the mapping is private to this value, which is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl<T> Drop for PageSlice<T> {
    fn drop(&mut self) {
        let bytes = self.len * size_of::<T>();
        if bytes > 0 {
            // SAFETY: the mapping was made by `zeroed` with this length and nothing borrows it any more.
            unsafe { libc::munmap(self.start.as_ptr().cast(), bytes) };
        }
    }
}

impl<T> fmt::Debug for PageSlice<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PageSlice").field("len", &self.len).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_zero_and_aligned() {
        let mut slice = PageSlice::<f32>::zeroed(5000).unwrap();
        assert!(slice.iter().all(|x| *x == 0.0));
        assert_eq!(slice.as_ptr().addr() % 4096, 0);
        slice[4999] = 1.0;
        assert_eq!(slice[4999], 1.0);
        assert!(PageSlice::<u8>::zeroed(0).unwrap().is_empty());
    }

    #[test]
    fn scratch_grows_and_is_kept() {
        let mut scratch = Scratch::<u32>::default();
        assert!(scratch.take(0).is_empty());
        scratch.take(100).fill(7);
        assert_eq!(scratch.take(60), [7; 60]);
        assert_eq!(scratch.take(1 << 20).len(), 1 << 20);
    }

    #[test]
    #[should_panic(expected = "refused")]
    fn too_much_scratch_is_a_panic() {
        Scratch::<u64>::default().take(1 << 59);
    }

    #[test]
    fn too_much_is_an_error() {
        assert_eq!(PageSlice::<f32>::zeroed(usize::MAX / 2).unwrap_err(), AllocError { bytes: u64::MAX });
        let bytes = 1 << 60;
        assert_eq!(PageSlice::<u8>::zeroed(bytes).unwrap_err(), AllocError { bytes: bytes as u64 });
    }
}
